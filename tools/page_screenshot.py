r"""Takes a picture of a page of `onnxpar report`, for the docs.

    python tools/page_screenshot.py gpt.html -o out.png --select '/layer*/attn/q_proj/MatMul'

`--select` clicks the node of this name, so that its details are shown. The script needs what
`tools/netron_screenshot.py` needs. The picture in the README is that of these commands:

    python models/transformer.py --layers 4 --loss -o gpt.onnx
    onnxpar shard gpt.onnx --strategy dp=2,tp=4,pp=2 --train --loss output:loss \
        --optimizer adamw -o gpt
    onnxpar report gpt -o gpt.html
    python tools/page_screenshot.py gpt.html -o docs/images/report.png \
        --select '/layer*/attn/q_proj/MatMul' --size 1500x860

That of a timeline in the reference is of a run on two cores:

    python models/transformer.py --layers 4 --d-model 256 --heads 8 --loss -o gpt.onnx
    echo '{mesh: {dp: 1}, pipeline: {stages: 2, micro_batches: 4}}' > stages.yaml
    onnxpar shard gpt.onnx --strategy stages.yaml --train --loss output:loss \
        --optimizer adamw -o gpt
    mpirun -n 2 onnxpar train gpt --data npz:tokens.npz --batch-size 32 --steps 12 --lr 1e-3 \
        --trace run.json --trace-operators      # tokens.npz: input_ids and labels, [256, 128]
    onnxpar report gpt --trace run.json -o gpt.html
    python tools/page_screenshot.py gpt.html -o docs/images/timeline.png --section trace \
        --size 1280x740
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from netron_screenshot import browser

SCROLL = """
    const section = document.getElementById(arguments[0]);
    section?.scrollIntoView({ behavior: "instant" });
    return Boolean(section);
"""
CLICK = """
    const rows = [...document.querySelectorAll("button.row")];
    const row = rows.find((one) => one.title.split("\\n")[0] === arguments[0]);
    row?.scrollIntoView({ block: "center", behavior: "instant" });
    row?.click();
    return Boolean(row);
"""


def take(page: Path, out: Path, select: str, section: str, theme: str, size: str) -> None:
    """Opens a page, and writes a picture of the window.

    Raises:
        SystemExit: There is no such node or section.
    """
    width, height = map(int, size.split("x"))
    driver = browser(width, height)
    try:
        # A window has at least 500 columns; the page that it shows may have fewer.
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page.resolve().as_uri())
        driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        if section and not driver.execute_script(SCROLL, section):
            raise SystemExit(f"no section is called {section!r}")
        if select and not driver.execute_script(CLICK, select):
            raise SystemExit(f"no node is called {select!r}")
        driver.save_screenshot(str(out))
    finally:
        driver.quit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("page", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--select", default="", metavar="NODE")
    parser.add_argument("--section", default="", help="scroll to this section, such as memory")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--size", default="1280x820", help="width and height in pixels")
    given = parser.parse_args(arguments)
    take(given.page, given.out, given.select, given.section, given.theme, given.size)
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
