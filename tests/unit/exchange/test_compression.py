"""What a rank makes of bytes that cannot be what another one sent."""

import numpy as np
import pytest

from pibroch.errors import ProtocolError
from pibroch.exchange.compression import _compressed, _decompressed, _rooms


def test_bytes_that_are_no_codes_are_an_error():
    with pytest.raises(ProtocolError, match="400 bytes that are no codes of 2000 numbers"):
        _decompressed(np.zeros(400, np.uint8), 2000)
    codes = _compressed(np.repeat(np.arange(4), 500).astype(np.uint8))
    assert len(codes) < 700
    assert np.array_equal(_decompressed(codes, 2000), np.repeat(np.arange(4), 500))
    with pytest.raises(ProtocolError, match="codes of 1000 numbers"):
        _decompressed(codes, 1000)
    with pytest.raises(ProtocolError, match="codes of 3000 numbers"):
        _decompressed(codes, 3000)


@pytest.mark.parametrize("length", [-1, 2001])
def test_more_codes_than_numbers_are_an_error_before_there_is_room_for_them(length):
    with pytest.raises(
        ProtocolError, match=f"got {length} bytes of codes from rank 1; need at most 2000"
    ):
        _rooms([0, length], [0, 2000])
