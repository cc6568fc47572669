"""Collection of garbage is put off, and goes on afterwards."""

import gc

import pytest

from onnxpar.core.garbage import no_collection


def test_collection_goes_on_afterwards() -> None:
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a mistake"), no_collection():
        raise ValueError("a mistake")
    assert gc.isenabled()


def test_where_it_is_off_it_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
