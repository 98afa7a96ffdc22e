"""The words with which a checkpoint must be refused."""

import pytest

from paged_kv.errors import CheckpointError


def refused(call, *args, match=None, **options):
    """The message of the CheckpointError that a call raises: one printable line that is not too long."""
    with pytest.raises(CheckpointError, match=match) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message
