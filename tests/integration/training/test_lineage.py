"""The same step of two rounds is not the same state: a host that was cut off may have committed it in the old one."""

from __future__ import annotations

import json
import sys

import pytest

_RANK = """
import json, sys
import torch.distributed as dist
from elastic_runtime.training.sync import Standing, agree
rank, path, lineages, source = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
own = Standing(step=9, digest=5, fresh=False, torn=False, lineage=lineages[rank])
print(json.dumps(agree(own, source=source, world=2)))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("lineages", "source", "expected"), [([4, 4], 1, None), ([3, 4], 1, 1), ([3, 4], 0, 0)]
)
def test_equal_steps_of_two_rounds_are_brought_in_step(sandbox, lineages, source, expected):
    script = sandbox.script(_RANK)
    words = [str(sandbox.folder / "store"), json.dumps(lineages), str(source)]
    ranks = [
        sandbox.start(sys.executable, script, rank, *words, env={"GLOO_SOCKET_IFNAME": "lo"})
        for rank in (0, 1)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        assert json.loads(out) == expected
