"""What to check an engine against: models of it in NumPy, and a server to ask.

`ListModel` says what the ring and the pooled keys must be. For `max serve` there are
`MaxServer`, which runs it; `Client` and the `check_*` functions, which ask it for
completions and compare them; and `ReferenceDecoder`, which says what they must be, for
the model of examples/serve. Nothing here needs MAX or the kernels, except that the
server is MAX's.
"""

from .completions import (
    Client,
    Completion,
    Prompt,
    check_alone_equals_concurrent,
    check_answers,
)
from .decoder import Answer, ReferenceDecoder
from .list_model import ListModel, wrong_channels
from .server import Batch, MaxServer, ServerError

__all__ = [
    "Answer",
    "Batch",
    "Client",
    "Completion",
    "ListModel",
    "MaxServer",
    "Prompt",
    "ReferenceDecoder",
    "ServerError",
    "check_alone_equals_concurrent",
    "check_answers",
    "wrong_channels",
]
