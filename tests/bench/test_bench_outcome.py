"""What a benchmark says of itself."""

import pytest

from refitd.bench.outcome import command


@pytest.mark.parametrize(
    "argv", [["--repeats", "3", "--out", "/x/y.json"], ["--out=/x/y.json", "--repeats", "3", "--plot", "/x/y.svg"]]
)
def test_the_recorded_command_names_no_place_of_its_machine(argv):
    """Where the numbers went is not part of how they were made."""
    assert command("plan", argv) == "refitd bench plan --repeats 3"
