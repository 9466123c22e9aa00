"""The README's figure is the one its script draws."""

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FIGURE = Path(__file__).parents[1] / "docs/figures/ring.svg"


def test_committed_figure_is_what_the_script_draws():
    script = runpy.run_path(str(FIGURE.with_suffix(".py")))
    assert FIGURE.read_text(encoding="utf-8") == script["draw"]()


def test_figure_is_well_formed_svg():
    root = ElementTree.parse(FIGURE).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
