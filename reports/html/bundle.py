"""plotly.js in the form in which a browser starts it soonest.

The bundle is one function within another within a call. A browser first skims such a function, then parses all of it
once it is called. Where something watches it (developer tools, a test), it parses each such function that is running
again when an exception is thrown, as plotly's parts do while they start: five megabytes, five times. As the body of a
module the same code is skimmed once, and each part is parsed when it is needed. The module only defines the parts; they
are started by ``startPlotly()``, called from elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BUNDLE = re.compile(
    r"(?P<notice>\s*/\*.*?\*/)\s*"
    r"\(\s*function\s*\(root,\s*factory\)\s*\{.*?\}\s*\(typeof self.{0,80}?\(\)\s*=>\s*\{\s*"
    r'"use strict";\s*var Plotly\s*=\s*\(\(\)\s*=>\s*\{(?P<body>.*)return (?P<start>[\w$]+)\(\);?\s*\}\)\(\);'
    r"(?P<notices>\s*(?:/\*.*?\*/\s*)*)window\.Plotly = Plotly;\s*return Plotly;\s*\}\)\);?\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script element's content; ``module`` says whether the element is to be ``type="module"``."""

    text: str
    module: bool


def as_script(bundle: str) -> Script:
    """``bundle``, plotly.min.js, as a module where its wrapping is known, else as it is.

    The module sets ``window.startPlotly``, which returns what the bundle as it is makes ``window.Plotly``.
    """
    found = _BUNDLE.fullmatch(bundle)
    if found is None:
        return Script(text=bundle, module=False)
    text = f"{found['notice'].strip()}\n{found['body']}window.startPlotly={found['start']};{found['notices']}"
    return Script(text=text, module=True)
