"""A page in a real browser, as wide as a phone and as a screen, light and dark: screenshots, and what overflows or is hard to
read.

    python -m tests.browser report.html --out runs/browser

It needs Chromium, which no test needs: on Debian ``apt-get install chromium``, or the path of one in ``CHROMIUM``.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

WIDTHS = (390, 1280)
#: By name: the value of Chromium's switch for the scheme that a page is told that its reader prefers.
SCHEMES = {"light": "1", "dark": "0"}
_SECONDS = 120.0

#: Runs in the page. It tells the page around it how high the page is and what is wrong.
_LOOK = """
<script>
addEventListener("load", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const found = new Set(), width = document.documentElement.clientWidth;
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const scrolls = (element) => {
    for (let at = element; at; at = at.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true;
    return false;
  };
  if (document.documentElement.scrollWidth > width)
    found.add(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join(" ").trim();
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!text || ["SCRIPT", "STYLE"].includes(element.tagName) || !box.width || style.visibility === "hidden") continue;
    const shown = text.slice(0, 40), inside = element.closest("svg");
    if (box.right > width + 1 && !scrolls(element)) found.add(`"${shown}" ends at ${Math.round(box.right)} px`);
    const ink = numbers(inside ? style.fill : style.color);
    const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    const ratio = contrast(ink, behind(element));
    if (ink.length && ratio < least) found.add(`"${shown}" has a contrast of ${ratio.toFixed(1)}`);
    const drawn = inside && inside.viewBox.baseVal.width;
    const scale = drawn ? inside.getBoundingClientRect().width / drawn : 1;
    const pixels = parseFloat(style.fontSize) * scale;
    if (pixels < 8) found.add(`"${shown}" is ${pixels.toFixed(1)} px high`);
  }
  parent.postMessage({height: document.documentElement.scrollHeight, found: [...found]}, "*");
});
</script>
"""

#: The page around it. Its frame has the width in question, which no window may have.
_AROUND = """<!DOCTYPE html>
<style>body {{ margin: 0; }} iframe {{ border: 0; width: {width}px; height: {height}px; display: block; }}</style>
<iframe src="{page}"></iframe>
<script>addEventListener("message", (event) => {{
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify(event.data);
  if (!document.getElementById("told") && !{quiet}) document.body.append(told);
}});</script>
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description="Show a page in Chromium, and check it.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/browser"), metavar="DIR", help="for the screenshots")
    arguments = parser.parse_args()
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("Chromium is missing: apt-get install chromium, or set CHROMIUM to its path", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = 0
    for name, lines in looked_at(browser, arguments.page, arguments.out):
        problems += len(lines)
        print(f"{name}: {'as it should be' if not lines else ''}", *lines, sep="\n  ")
    return 1 if problems else 0


def looked_at(browser: str, page: Path, out: Path) -> Iterator[tuple[str, list[str]]]:
    """Write a screenshot for each width and scheme. Yields its name, and what is wrong with the page there."""
    with tempfile.TemporaryDirectory() as directory:
        inside, around = Path(directory, "page.html"), Path(directory, "around.html")
        inside.write_text(page.read_text() + _LOOK)
        for width in WIDTHS:
            for scheme, switch in SCHEMES.items():
                options = [f"--blink-settings=preferredColorScheme={switch}", f"--user-data-dir={directory}/profile"]
                around.write_text(_AROUND.format(width=width, height=900, page=inside.name, quiet="false"))
                told = _chromium(browser, around, *options, "--dump-dom", "--virtual-time-budget=5000")
                found = re.search(r'<pre id="told">(.*?)</pre>', told, re.DOTALL)
                if found is None:
                    raise RuntimeError(f"{page} did not load in {browser}: {told[:500]}")
                said = json.loads(html.unescape(found[1]))
                height = min(int(said["height"]), 16_000)
                around.write_text(_AROUND.format(width=width, height=height, page=inside.name, quiet="true"))
                shot = out / f"{page.stem}-{width}-{scheme}.png"
                window = f"--window-size={max(width, 500)},{height}"
                _chromium(browser, around, *options, window, f"--screenshot={shot.resolve()}", "--virtual-time-budget=5000")
                yield shot.name, said["found"]


def _chromium(browser: str, page: Path, *options: str) -> str:
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
