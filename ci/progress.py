"""Show what matters of ci/setup.sh's log: `now` for the step under way, `failure` for the reasons of a failed one.

    python progress.py now|failure LOG FIRST_LINE [SITE_PACKAGES STARTED]

Standard library only: it runs before the environment is there.
"""

import os
import re
import sys

REASON = re.compile(r"^ *error|no matching distribution|no space left|do not match the hashes|no module named", re.I)
WIDTH = 300


def now(lines, site, started):
    """Return a short line: what pip fetches, or how many packages it has installed since `started` (seconds)."""
    for line in reversed(lines):
        if line.startswith("Installing collected packages:"):
            total = line.count(",") + 1
            done = 0
            for name in os.listdir(site):
                done += name.endswith(".dist-info") and os.stat(os.path.join(site, name)).st_mtime > started
            return f"installed {min(done, total)} of {total} packages"
        found = re.match(r"\s*(Downloading|Using cached) +(\S+\.(?:whl|gz|zip))|\s*(Collecting) +(\S+)", line)
        if found:
            return f"{(found[1] or found[3]).lower()} {(found[2] or found[4]).rpartition('/')[2][:70]}"
    return ""


def failure(lines):
    """Return the reasons of a failure, each once, and the last lines."""
    reasons = list(dict.fromkeys(line.strip() for line in lines if REASON.search(line)))[:5]
    last = [line for line in lines[-12:] if line.strip() and line.strip() not in reasons]
    return "\n".join(line[:WIDTH] for line in [*reasons, "...", *last])


def main(argv):
    with open(argv[2], encoding="utf-8", errors="replace") as log:
        lines = log.read().splitlines()[int(argv[3]) - 1 :]
    text = now(lines, argv[4], float(argv[5])) if argv[1] == "now" else failure(lines)
    # a terminal without UTF-8 gets question marks rather than an error
    sys.stdout.buffer.write((text + "\n").encode(sys.stdout.encoding or "ascii", "replace"))


if __name__ == "__main__":
    main(sys.argv)
