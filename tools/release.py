"""Makes a release: the version, the changelog, a commit and a tag, wheels, checksums and an SBOM.

    python tools/release.py 0.2.0 -o dist

Nothing is pushed or uploaded. The tree must be clean, and the changelog must have something under
"Unreleased". The first release has the version that the sources have already. If the wheels cannot
be built, or after Ctrl-C, the commit, the tag and DIR are taken back. Otherwise DIR has the wheels
and the sdist, `SHA256SUMS`, and for each wheel `NAME.cdx.json`, the packages that it needs, in the
form of CycloneDX 1.6.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import date
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSION, CHANGELOG = Path("onnxpar/core/version.py"), Path("CHANGELOG.md")
ARCHITECTURES = ("x86_64", "aarch64")
_UNRELEASED = "## [Unreleased]\n"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?\s*([^;]*)(?:;\s*(.*))?")


class ReleaseError(Exception):
    """Why no release can be made."""


def main() -> int:
    """Makes the release; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    try:
        release(ROOT, options.version, options.out.absolute(), build)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print(f"git push origin HEAD v{options.version}    # once the files in {options.out} are tried")
    return 0


def release(root: Path, version: str, out: Path, make: Callable[[Path, Path], None]) -> None:
    """Makes a release of a checkout.

    Args:
        root: The checkout.
        version: The version.
        out: Where the files go; a new folder.
        make: Builds wheels and sdist of the checkout into a folder.

    Raises:
        ReleaseError: The checkout, the version or the changelog is not ready, or a build failed.
    """
    old = _version(root)
    tag = f"v{version}"
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None or _parts(version) < _parts(old):
        raise ReleaseError(f"expected a version such as 1.2.3, {old} or later, got {version}")
    if _git(root, "tag", "--list", tag):
        raise ReleaseError(f"the tag {tag} exists")
    if out.exists():
        raise ReleaseError(f"{out}: expected a new folder")
    if _git(root, "status", "--porcelain"):
        raise ReleaseError("the tree has changes that are not committed")
    before = _git(root, "rev-parse", "HEAD")
    changelog = released((root / CHANGELOG).read_text("utf-8"), version, date.today())
    source = (root / VERSION).read_text("utf-8").replace(f'"{old}"', f'"{version}"')
    try:
        (root / CHANGELOG).write_text(changelog, "utf-8")
        (root / VERSION).write_text(source, "utf-8")
        files = str(CHANGELOG), str(VERSION)
        _git(root, "commit", "--quiet", "-m", f"Release {version}", "--", *files)
        _git(root, "tag", "-a", tag, "-m", f"onnxpar {version}")
        out.mkdir(parents=True)
        make(root, out)
        for wheel in sorted(out.glob("*.whl")):
            text = json.dumps(sbom(wheel), indent=1) + "\n"
            wheel.with_suffix(".cdx.json").write_text(text, "utf-8")
        (out / "SHA256SUMS").write_text(sums(out), "utf-8")
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if _git(root, "tag", "--list", tag):
            _git(root, "tag", "-d", tag)
        _git(root, "reset", "--quiet", "--hard", before)
        known = (OSError, subprocess.CalledProcessError, ReleaseError, KeyboardInterrupt)
        if not isinstance(error, known):
            raise
        raise ReleaseError(f"taken back: {str(error) or 'interrupted'}") from error


def build(root: Path, out: Path) -> None:
    """Builds the sdist, and a wheel for each processor."""
    for architecture in ARCHITECTURES:
        subprocess.run(["tools/wheel", "-o", out, "--arch", architecture], cwd=root, check=True)


def released(changelog: str, version: str, day: date) -> str:
    """Returns the changelog with what is unreleased under the version.

    Raises:
        ReleaseError: Nothing is unreleased.
    """
    before, found, after = changelog.partition(_UNRELEASED)
    if not found or not after.partition("\n## [")[0].strip():
        raise ReleaseError(f"{CHANGELOG}: expected changes under 'Unreleased', got none")
    return f"{before}{_UNRELEASED}\n## [{version}] - {day.isoformat()}\n{after}"


def sums(folder: Path) -> str:
    """Returns what `sha256sum -c` checks: the digest of each file of a folder."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    return "\n".join(lines) + "\n"


def sbom(wheel: Path) -> dict[str, Any]:
    """Returns the packages that a wheel needs, and the libraries in it, as CycloneDX."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(metadata).decode())
        shared = sorted(name for name in names if name.endswith(".so") or ".so." in name)
        libraries = [
            {"type": "file", "name": name, "hashes": [_hash(archive.read(name))]} for name in shared
        ]
        linked = {part for name in shared for part in _linked(name, archive.read(name))}
    name, version = header["Name"], header["Version"]
    needed = [_component(text) for text in header.get_all("Requires-Dist", [])]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                "licenses": [{"expression": header["License-Expression"] or "Apache-2.0"}],
                "hashes": [_hash(wheel.read_bytes())],
            }
        },
        "components": [*needed, *libraries, *(_static(*part) for part in sorted(linked))],
    }


def _linked(name: str, library: bytes) -> list[tuple[str, str]]:
    """Returns the parts of LLVM that are linked into a library, with their version.

    `tools/wheel` links zig's libc++ into it, which is that of LLVM, of the compiler's version.
    """
    if b"libc++abi" not in library:
        return []
    compiler = re.search(rb"clang version (\d+\.\d+\.\d+)", library)
    if compiler is None:
        raise ReleaseError(f"{name}: expected the version of its compiler, which is libc++'s")
    return [(part, compiler[1].decode()) for part in ("libc++", "libc++abi", "libunwind")]


def _static(name: str, version: str) -> dict[str, Any]:
    """Returns a part of LLVM."""
    return {
        "type": "library",
        "name": name,
        "version": version,
        "supplier": {"name": "LLVM"},
        "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
        "properties": [{"name": "onnxpar:linked", "value": "statically, from the ziglang wheel"}],
    }


def _hash(data: bytes) -> dict[str, str]:
    return {"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}


def _component(text: str) -> dict[str, Any]:
    """Returns a requirement; those of an extra are optional."""
    found = _REQUIREMENT.fullmatch(text.strip())
    if found is None:
        raise ReleaseError(f"unreadable requirement {text!r}")
    name, _, versions, marker = found.groups()
    entry: dict[str, Any] = {
        "type": "library",
        "name": name,
        "purl": f"pkg:pypi/{name.lower()}",
        "scope": "optional" if "extra ==" in (marker or "") else "required",
        "properties": [{"name": "onnxpar:requirement", "value": versions.strip() or "any"}],
    }
    if marker:
        entry["properties"].append({"name": "onnxpar:marker", "value": marker})
    return entry


def _version(root: Path) -> str:
    text = (root / VERSION).read_text("utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise ReleaseError(f"{VERSION}: there is no version")
    return found[1]


def _parts(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
