"""Say what pip-audit has found, as a line each; status 1 if anything, 0 also if its list could not be reached."""

import json
import sys
from pathlib import Path


def main(file: Path) -> int:
    """Print what the JSON ``file`` of pip-audit holds, which is empty where no network was to be had."""
    content = file.read_text(encoding="utf-8")
    packages = json.loads(content)["dependencies"] if content.strip() else []
    found = [(one, bad) for one in packages for bad in one.get("vulns", ())]
    for one, bad in found:
        fixed = ", ".join(bad.get("fix_versions", ())) or "no version"
        print(f"{one['name']} {one['version']}: {bad['id']}, mended in {fixed}")
    known = sum("vulns" in one for one in packages)
    print(f"{len(found)} known vulnerabilities in {known} packages; {len(packages) - known} could not be looked up.")
    if not known:
        print("The list of known vulnerabilities can't be reached: nothing follows from this.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
