"""The digest of twenty runs is compared with what design note 0009 says of this processor."""

import digest


def test_digests_are_noted_by_processor():
    noted = digest.noted_digests()
    assert noted["x86-64-v3"] == noted["cascadelake"] != noted["znver4"]
    of_zen = noted["znver4"]
    assert digest.compared(of_zen, "znver4 avx2, torch AVX2") == "znver4 avx2, torch AVX2: as noted"
    assert digest.compared("0" * 64, "znver4").endswith(f"NOT the noted {of_zen}")
    assert digest.compared(of_zen, "m68k").endswith("none is noted for m68k")
