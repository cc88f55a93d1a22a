"""Max-min fair shares: what each of several flows gets of the links that they meet on.

All flows rise together until a link is full; those on it stay there, and the others rise on
(progressive filling: Bertsekas and Gallager, "Data Networks", 2nd edition, section 6.5.2). So no
flow can have more without taking from one that has no more than it:

    rate of a flow  =  min over its links of  (capacity - rates of flows that are full) / others"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NONE = -1  # in a route: no further link


def fair_shares(
    routes: NDArray[np.int64], capacities: Floats, counts: Floats | None = None
) -> Floats:
    """Bytes a second of each flow, or of each of `counts` equal flows.

    routes: the links of each flow, a row each, `NONE` for no further one; a flow on no link at
    all has no limit. capacities: of each link. counts: by flow, or by flow and link of its route,
    where not all of the equal flows take the same links."""
    flows = len(routes)
    used = routes != NONE
    flow_of, link_of = np.nonzero(used)[0], routes[used]
    each = np.ones(flows) if counts is None else counts
    weights = each[used] if each.ndim == 2 else each[flow_of]
    rates = np.full(flows, np.inf)
    left = capacities.astype(float).copy()
    rising = used.any(axis=1)
    while rising.any():
        there = rising[flow_of]
        load = np.bincount(link_of[there], weights[there], minlength=len(left))
        share = np.full(len(left), np.inf)
        np.divide(left, load, out=share, where=load > 0)
        level = share.min()
        full = share <= level * (1 + 1e-12)
        stays = np.zeros(flows, dtype=bool)
        stays[flow_of[there & full[link_of]]] = True
        rates[stays] = level
        taken = stays[flow_of]
        left -= np.bincount(link_of[taken], level * weights[taken], minlength=len(left))
        left = np.maximum(left, 0.0)
        rising &= ~stays
    return rates
