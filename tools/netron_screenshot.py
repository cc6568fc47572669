"""Takes a picture of a rank's graph in Netron, for the docs.

    python tools/netron_screenshot.py DIR -o docs/images/netron.png --simple --select AllReduce

It needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium (`pip install
'onnxpar[test]'`). `--select` clicks the first node with this title, so that its attributes and
metadata are shown. Netron itself comes with onnxpar; nothing is sent anywhere.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import netron
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from onnxpar.cli.view import graph_file, simple_file

SECONDS = 60
NODE = ".node-item"


def browser(width: int, height: int) -> webdriver.Chrome:
    """Returns Chromium without a window."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.binary_location = which("chromium") or which("google-chrome") or ""
    driver = which("chromedriver")
    return webdriver.Chrome(options, webdriver.ChromeService(driver) if driver else None)


def take(graph: Path, out: Path, select: str, width: int, height: int) -> None:
    """Opens a graph in Netron, and writes a picture of the window.

    Raises:
        SystemExit: No node has the title.
    """
    host, port = netron.start(str(graph), browse=False)
    driver = browser(width, height)
    try:
        address = f"http://{host}:{port}"
        driver.get(address)
        # Netron asks once for consent to report errors; requests to its hosts are refused here.
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*google*", "*netron.app*"]})
        driver.add_cookie({"name": "consent", "value": "1"})
        driver.get(address)
        WebDriverWait(driver, SECONDS).until(lambda d: d.find_elements(By.CSS_SELECTOR, NODE))
        time.sleep(1)  # the layout is drawn step by step
        if select:
            nodes = driver.find_elements(By.CSS_SELECTOR, NODE)
            found = [n for n in nodes if n.text.strip().startswith(select)]
            if not found:
                titles = sorted({n.text.strip() for n in nodes})
                raise SystemExit(f"no node is called {select!r}; there are {titles}")
            driver.execute_script(
                "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", found[0]
            )
            time.sleep(1)
        driver.save_screenshot(str(out))
    finally:
        driver.quit()
        netron.stop((host, port))


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--program")
    parser.add_argument("--simple", action="store_true")
    parser.add_argument("--select", default="")
    parser.add_argument("--size", default="1100x900", help="width and height in pixels")
    given = parser.parse_args(arguments)
    width, height = map(int, given.size.split("x"))
    with TemporaryDirectory() as folder:
        graph = graph_file(given.directory, given.program, given.rank)
        if given.simple:
            graph = simple_file(given.directory, graph, given.program, Path(folder))
        take(graph, given.out, given.select, width, height)
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
