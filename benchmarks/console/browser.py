"""The system's Chromium without a window, driven by Selenium; it reaches nothing but this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND , "
         "EXCLUDE 127.0.0.1 , EXCLUDE localhost")


@contextmanager
def chromium(width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(shutil.which("chromedriver") or "chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def emulate(driver: Chrome, width: int, height: int, *, dark: bool = False, still: bool = True) -> None:
    """The size of the page, its colours, and whether the reader wants no motion."""
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}]})


def complaints(driver: Chrome) -> list[str]:
    """The warnings and errors of the browser's console since the last call."""
    return [str(entry["message"]) for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
