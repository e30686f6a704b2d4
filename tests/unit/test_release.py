"""What `make release-check` says of version and changelog; the wheel it builds and tries itself."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest

from doc_pages import ROOT

SPEC = spec_from_file_location("release_check", ROOT / "tools" / "release_check.py")
assert SPEC is not None and SPEC.loader is not None
release_check = module_from_spec(SPEC)
SPEC.loader.exec_module(release_check)
UNRELEASED = "# Changelog\n\n## Unreleased\n\n### Added\n- All.\n"
RELEASED = "# Changelog\n\n## 0.2.0 (2026-11-23)\n- More.\n\n## 0.1.0 (2026-01-31)\n- All.\n"


def test_this_checkout_has_a_version_and_a_changelog_for_it():
    version = release_check.version_of(ROOT)
    assert release_check.check_changelog((ROOT / "CHANGELOG.md").read_text(), version)


def test_a_changelog_belongs_to_a_version():
    assert release_check.check_changelog(UNRELEASED, "0.1.0") == "Unreleased"
    assert release_check.check_changelog(RELEASED, "0.2.0") == "0.2.0 (2026-11-23)"


@pytest.mark.parametrize(
    ("text", "version", "problem"),
    [
        ("# Changelog\n", "0.1.0", "no heading"),
        (UNRELEASED.replace("- All.", ""), "0.1.0", "nothing below"),
        (RELEASED, "0.3.0", "begins with 0.2.0, version.py has 0.3.0"),
        (UNRELEASED + "\n## 0.1.0 (2026-01-31)\n- All.\n", "0.1.0", "released already"),
    ],
)
def test_one_that_does_not_is_refused(text, version, problem):
    with pytest.raises(ValueError, match=problem):
        release_check.check_changelog(text, version)


def test_a_version_that_is_none_is_refused(tmp_path):
    (tmp_path / "src/pibroch").mkdir(parents=True)
    (tmp_path / "src/pibroch/version.py").write_text('__version__ = "next"\n')
    with pytest.raises(ValueError, match=r"version.py has next; need one such as 1\.2\.3"):
        release_check.version_of(tmp_path)
