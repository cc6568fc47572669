"""A release: version, changelog, commit, tag, checksums and SBOM; or nothing at all."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import release as tool

LOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n"
    "## [0.1.0] - 2020-01-01\n\n- All.\n"
)
METADATA = (
    "Metadata-Version: 2.4\nName: onnxpar\nVersion: 0.2.0\nLicense-Expression: Apache-2.0\n"
    "Requires-Dist: numpy<3,>=2.0\nRequires-Dist: mpi4py<5,>=4; extra == 'openmpi'\n\nText.\n"
)
LIBRARY = b"code\0libc++abi: \0clang version 22.1.8\0"
"""Part of what is in a library that zig has linked."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    root = tmp_path / "root"
    (root / tool.VERSION).parent.mkdir(parents=True)
    (root / tool.VERSION).write_text('__version__ = "0.1.0"\n')
    (root / tool.CHANGELOG).write_text(LOG)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def built(root: Path, out: Path) -> None:
    """Stands in for the build of a wheel."""
    assert '"0.2.0"' in (root / tool.VERSION).read_text()
    with zipfile.ZipFile(out / "onnxpar-0.2.0-py3-none-any.whl", "w") as archive:
        archive.writestr("onnxpar-0.2.0.dist-info/METADATA", METADATA)
        archive.writestr("onnxpar_runtime/lib/libonnxpar_ops.so", LIBRARY)


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_release(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    tool.release(checkout, "0.2.0", out, built)
    assert git(checkout, "describe", "--exact-match") == "v0.2.0"
    assert git(checkout, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert git(checkout, "status", "--porcelain") == ""
    changelog = (checkout / tool.CHANGELOG).read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 20" in changelog and changelog.count("A thing") == 1
    wheel, bom = out / "onnxpar-0.2.0-py3-none-any.whl", out / "onnxpar-0.2.0-py3-none-any.cdx.json"
    lines = dict(line.split("  ")[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert lines == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (wheel, bom)}
    found = json.loads(bom.read_text())
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/onnxpar@0.2.0"
    numpy, mpi, library, *linked = found["components"]
    assert (numpy["name"], numpy["scope"]) == ("numpy", "required")
    assert numpy["properties"] == [{"name": "onnxpar:requirement", "value": "<3,>=2.0"}]
    assert (mpi["name"], mpi["scope"]) == ("mpi4py", "optional")
    assert library["name"] == "onnxpar_runtime/lib/libonnxpar_ops.so"
    assert [part["name"] for part in linked] == ["libc++", "libc++abi", "libunwind"]
    assert all(part["version"] == "22.1.8" for part in linked)
    assert linked[0]["licenses"] == [{"expression": "Apache-2.0 WITH LLVM-exception"}]


@pytest.mark.parametrize(
    ("library", "parts"),
    [(b"GCC: (Debian) 12.2.0", 0), (b"libc++abi: \0", "expected the version of its compiler")],
)
def test_libraries_of_other_compilers(library: bytes, parts: int | str, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onnxpar-0.2.0.dist-info/METADATA", METADATA)
        archive.writestr("lib.so", library)
    if isinstance(parts, str):
        with pytest.raises(tool.ReleaseError, match=rf"lib\.so: {parts}"):
            tool.sbom(wheel)
    else:
        assert "libc++" not in json.dumps(tool.sbom(wheel))


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError("no compiler"), "no compiler"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_build_that_fails_leaves_no_trace(
    checkout: Path, tmp_path: Path, error: BaseException, why: str
) -> None:
    def fails(root: Path, out: Path) -> None:
        (out / "half.whl").touch()
        raise error

    before = git(checkout, "rev-parse", "HEAD")
    with pytest.raises(tool.ReleaseError, match=f"taken back: {why}"):
        tool.release(checkout, "0.2.0", tmp_path / "dist", fails)
    assert git(checkout, "rev-parse", "HEAD") == before and git(checkout, "tag") == ""
    assert (checkout / tool.CHANGELOG).read_text() == LOG
    assert not (tmp_path / "dist").exists()


def test_the_first_release_has_the_version_of_the_sources(checkout: Path, tmp_path: Path) -> None:
    tool.release(checkout, "0.1.0", tmp_path / "dist", lambda root, out: None)
    assert git(checkout, "describe", "--exact-match") == "v0.1.0"
    with pytest.raises(tool.ReleaseError, match=r"the tag v0\.1\.0 exists"):
        tool.release(checkout, "0.1.0", tmp_path / "again", built)


def test_what_is_not_ready(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    for version in ("0.0.9", "1.0", "next"):
        with pytest.raises(tool.ReleaseError, match=r"0\.1\.0 or later"):
            tool.release(checkout, version, out, built)
    (checkout / "new").write_text("")
    with pytest.raises(tool.ReleaseError, match="not committed"):
        tool.release(checkout, "0.2.0", out, built)
    (checkout / "new").unlink()
    (checkout / tool.CHANGELOG).write_text(LOG.replace("### Added\n\n- A thing.\n\n", ""))
    git(checkout, "commit", "-qam", "Say nothing")
    with pytest.raises(tool.ReleaseError, match="expected changes under 'Unreleased', got none"):
        tool.release(checkout, "0.2.0", out, built)
    assert not out.exists()
