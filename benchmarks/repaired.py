"""DistributedDataParallel under torchrun, repaired, over hosts of a lab to which faults are done.

torchrun of torch 2.13 does not get over a lost worker with gloo: restarted ones meet the store of
before (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives them another). A host whose torchrun has ended
while the host is there is started again. Rank 0 writes a checkpoint each 20 steps; useful are the
samples of the steps that were reached at the end."""

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import faults
from benchmarks.faults import Act
from benchmarks.hosts import HOSTS, TARGET, Launcher, Run
from synchromesh.lab import Lab

EVERY, ROWS = 20, 256  # steps from one checkpoint to the next; rows of a batch
TIMEOUT = 5.0  # seconds, of a collective: as long as a silent host is waited for
# seconds: hosts are waited for as by an elastic run, and are gone without a word for 4
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=4"


class Repaired(Run):
    """torchrun on each host; `step` is the last one that was reached."""

    def __init__(self, lab: Lab, folder: Path, begin: int) -> None:
        self.lab, self.folder, self.ways = lab, folder, lab.ways()
        variables = self.ways[0].variables
        self.address = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        (folder / "mlp.py").write_text(TARGET)
        (folder / "steps").touch()
        self.launchers = {}
        for host in range(begin):
            self.join(host)

    def join(self, host: int) -> None:
        words = [
            "-m", "torch.distributed.run", f"--nnodes=1:{HOSTS}", "--nproc-per-node=1",
            "--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.address}",
            "--rdzv-id=lab", f"--rdzv-conf={RENDEZVOUS},is_host={host == 0}",
            f"--local-addr={self.lab.states()[host].address}", "--monitor-interval=0.1",
            "-m", "benchmarks.repaired", str(self.folder),
        ]  # fmt: skip
        more = {**self.variables(host), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        way = self.ways[host]
        self.launchers[host] = Launcher(
            way.start([sys.executable, *words], os.getpid(), more, self.folder)
        )

    @property
    def step(self) -> int:
        return max(map(int, (self.folder / "steps").read_text().split()), default=0)


def replay(run: Run, acts: Sequence[Act], seconds: float) -> None:
    """Does the same at the same moments. A launcher that ended where the host is there is started
    again, as whoever runs it would."""
    began, gone, left = time.monotonic(), {*range(HOSTS)} - {*run.launchers}, [*acts]
    while (now := time.monotonic() - began) < seconds:
        while left and left[0].seconds <= now:
            act = left.pop(0)
            if act.word in ("kill", "leave", "cut"):
                gone.add(act.host)
            elif act.word in ("join", "heal"):
                gone.discard(act.host)
            known = run.launchers.get(act.host)
            if act.word != "join" or known is None or known.ended:
                faults.perform(run, act.word, act.host)
        for host in [h for h in range(HOSTS) if h not in gone and run.launchers[h].ended]:
            run.lab.kill(host)
            run.join(host)
        time.sleep(0.1)


def samples(lab: Lab, acts: Sequence[Act], seconds: float, begin: int) -> dict[str, Any]:
    """Useful samples of a run with these faults."""
    with tempfile.TemporaryDirectory() as folder:
        run = Repaired(lab, Path(folder), begin)
        try:
            run.until(lambda: run.step >= EVERY)
            before = run.step
            replay(run, acts, seconds)
            steps = run.step - before
            made = len((run.folder / "steps").read_text().split())
        finally:
            for host in range(HOSTS):
                lab.thaw(host)
                lab.heal(host)
            run.close()
    return {
        "samples": ROWS * steps, "samples_per_second": ROWS * steps / seconds, "steps": steps,
        "useful_steps": (steps + before) / made,
    }  # fmt: skip


def worker(folder: Path) -> None:
    """A rank: trains from the newest checkpoint on, for ever."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, size = dist.get_rank(), dist.get_world_size()
    spec = importlib.util.spec_from_file_location("mlp", folder / "mlp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    work = module.workload()
    torch.manual_seed(0)
    model = work.model()
    optimizer, step, file = work.optimizer(model.parameters()), 0, folder / "last.pt"
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicated = DistributedDataParallel(model)
    rows, steps = work.train_data, len(work.train_data) // ROWS
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step // steps))
        batch = order[step % steps * ROWS :][:ROWS][rank::size].tolist()
        inputs, targets = (
            torch.stack(part) for part in zip(*(rows[i] for i in batch), strict=True)
        )
        optimizer.zero_grad()
        loss = work.loss(replicated, (inputs, targets)) * len(batch) * size / ROWS
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with (folder / "steps").open("a") as done:
                done.write(f"{step}\n")
            if step % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, folder / "last.new")
                os.replace(folder / "last.new", file)


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
