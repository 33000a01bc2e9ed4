"""What the tests expect of an error."""

import pytest

from jacstore.errors import InvalidRequestError


def refusal(call, *given, error=InvalidRequestError, **named):
    """The text of a refusal, which is one line."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    text = str(caught.value)
    assert text and "\n" not in text
    return text
