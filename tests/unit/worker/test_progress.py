from __future__ import annotations

import pytest

from elastic_runtime import worker


@pytest.mark.parametrize("name", ["time", "round", "world_size"])
def test_a_figure_cannot_take_the_name_of_what_every_line_has(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a name of its own"):
        worker.log(step=1, **{name: 1.0})
