"""Names of communications as PyTorch, gloo and NCCL write them."""

import pytest

from synchromesh.runs.calls import communication_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gloo:all_reduce", "all_reduce"), ("c10d::allreduce_", "all_reduce"),
        ("gloo:recv", "receive"), ("c10d::recv_", "receive"), ("c10d::send", "send"),
        ("_allgather_base", "all_gather"), ("all_gather_single", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"), ("reduce", "reduce"),
        ("c10d::alltoall_base_", "all_to_all"), ("c10d::broadcast_", "broadcast"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_receive"),
        ("aten::mm", None), ("c10d::monitored_barrier_", None),
    ],
)  # fmt: skip
def test_names(text: str, name: str | None) -> None:
    assert communication_name(text) == name
