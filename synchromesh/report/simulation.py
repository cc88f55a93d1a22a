"""The page of a simulation: plans over numbers of devices, with the error of what is known."""

from collections.abc import Callable

from synchromesh.report.drawing import SharedStyles, drawn
from synchromesh.report.figure import PageFigure, PageTable, Section
from synchromesh.report.numbers import devices, plain, share
from synchromesh.report.page import Chapter, rendered
from synchromesh.report.palette import marks
from synchromesh.report.scaling import lines
from synchromesh.simulator.simulated import Simulated

MISSING = "simulate --devices 1,8,64 shows numbers of devices, as far as plans can run there."


def page(made: Simulated) -> str:
    """One HTML page of what was simulated, as self-contained as that of a study."""
    shared, tables = SharedStyles(), [*made.tables()]
    best = max(made.plans, key=lambda p: (p.fits, p.samples_per_second))
    speed = f"the quickest plan: {plain(best.samples_per_second)} samples/s."
    told = speed if best.fits else f"not able to run, nor is any other plan: {best.reason}"
    answer = (f"On {devices(len(made.cluster.ranks))} {best.plan} is {told}",)
    kinds = (("speedup", plain), ("efficiency", share))
    known = any(s.devices > 1 for s in made.scaling)
    figures = tuple(_figure(made, *kind, shared) for kind in kinds if known)
    sections = (Section("s-scaling", "Speedup and efficiency", figures, MISSING),)
    return rendered(
        "simulation.html", shared, results={"title": tables[0][0], "note": ""}, made=made,
        chapters=[Chapter("s", made.workload, (("", answer),), sections, ())], tables=tables,
        notices=("Nothing was run: all figures are predictions.",), band=share(made.error_band),
    )  # fmt: skip


def _figure(
    made: Simulated, name: str, write: Callable[[float], str], shared: SharedStyles
) -> PageFigure:
    found = [(s.asked, s.devices, s.to_dict()[name]) for s in made.scaling]
    ran = {(plan, count): value for plan, count, value in found if count > 1}
    inks, band, shares = marks(s.asked for s in made.scaling), made.error_band, write is share
    (plan, count), most = max(ran.items(), key=lambda item: item[1])
    error = f"bands are ±{share(band)}, the error of seconds" if band else "no error is stated"
    drawings = drawn(name, lambda width: lines(width, ran, inks, band, shares))
    rows = tuple((plan, str(count), write(value)) for plan, count, value in found)
    return PageFigure(
        name, name.capitalize(),
        f"Lines of the {name} against the number of devices, one for each plan, and the ideal "
        f"line. The highest is {write(most)}: {plan} on {devices(count)}.",
        tuple(map(shared.classed, drawings)),
        PageTable(f"{name.capitalize()} over one device", ("plan", "devices", name), rows, 2),
        f"Dotted: ideal. Speedup is T₁/T_N{', efficiency that over N' * shares}; {error}.",
    )  # fmt: skip
