"""Messages that errors build."""

from elastic_runtime.errors import UnknownNameError


def test_a_short_list_of_names_is_given_whole():
    said = str(UnknownNameError.of("gate", "x", ["b", "a"]))
    assert said == "unknown gate 'x' (known: a, b)"
    assert str(UnknownNameError.of("gate", "x", [])) == "unknown gate 'x' (known: none)"


def test_of_a_long_list_the_near_names_come_first_and_the_rest_is_counted():
    names = [f"pixel_{row}_{column}" for row in range(8) for column in range(8)] + ["target"]
    said = str(UnknownNameError.of("slice_by column", "targt", names))
    assert said.startswith(
        "unknown slice_by column 'targt'; did you mean 'target'? (known: target, pixel_0_0, "
    )
    assert said.endswith(" … and 55 more)")
    assert said.count(",") == 9


def test_one_name_over_the_limit_is_given_rather_than_counted():
    said = str(UnknownNameError.of("name", "zzz", [f"n{i:02}" for i in range(11)]))
    assert "more" not in said
    assert "n10" in said
