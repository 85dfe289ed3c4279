"""A headless browser for tests of the page: chromedriver over plain HTTP, nothing installed for it."""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing():
    """What is not here, or nothing."""
    names = [name for name in ("chromedriver",) if shutil.which(name) is None]
    if not any(map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))):
        names.append("chromium")
    return " and ".join(names)


class Browser:
    """One window. `logs` has what the console said, `requests` every address that was asked for."""

    def __enter__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.profile = tempfile.mkdtemp()
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.base = f"http://127.0.0.1:{port}"
        names = ("chromium", "google-chrome", "chromium-browser")
        options = {
            "binary": next(path for path in map(shutil.which, names) if path),
            "args": [*FLAGS, f"--user-data-dir={self.profile}"],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        deadline = time.monotonic() + 30
        while True:
            try:
                session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    self.__exit__()
                    raise
                time.sleep(0.1)
        self.base += f"/session/{session['sessionId']}"
        return self

    def __exit__(self, *_):
        if "/session/" in self.base:
            request = urllib.request.Request(self.base, method="DELETE")
            urllib.request.urlopen(request, timeout=30).read()
        self.driver.terminate()
        self.driver.wait(30)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _post(self, path, body):
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, path):
        self._post("/url", {"url": path.as_uri() if hasattr(path, "as_uri") else path})

    def run(self, script, *arguments):
        """The value of a function's body in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name, **params):
        """A command of the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": name, "params": params})

    def size(self, width, height=900, dark=False):
        phone = width < 600
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path, height=None):
        """The whole page, or its upper part, as PNG."""
        height = height or self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.command("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def logs(self):
        return self._post("/se/log", {"type": "browser"})

    def requests(self):
        found = [
            json.loads(entry["message"])["message"]
            for entry in self._post("/se/log", {"type": "performance"})
        ]
        return [m["params"]["request"]["url"] for m in found if m["method"] == "Network.requestWillBeSent"]
