"""The NCCL path: abort and re-create. Needs two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device, and a second one")
def test_a_killed_peer_on_gpus(cluster: Any) -> None:
    cluster.start(2, strike="SIGKILL backward 1 7")
    ends = cluster.wait_for_end(1)
    assert [one["buffers"] for one in ends] == [[20, 20]]
