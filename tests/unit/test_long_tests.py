import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_long_tier_is_listed():
    """Each file with tests that only `LONG=1` runs stands in the table of tests/README.md."""
    files = [*ROOT.glob("tests/integration/test_*.py"), *ROOT.glob("tests/lab/test_*.py")]
    long = {
        path.stem for path in files if re.search(r"^from .* import .*LONG", path.read_text(), re.MULTILINE)
    }
    table = (ROOT / "tests" / "README.md").read_text()
    assert {stem for stem in long if f"`{stem}`" not in table and f"`lab/{stem}`" not in table} == set()
