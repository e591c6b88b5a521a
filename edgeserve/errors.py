"""Every error a user can meet, as one tree.

Owns the messages' shape: what went wrong, then what to do about it. Knows nothing of HTTP frameworks,
terminals or the runtime; each front end renders the same error its own way, without a traceback.

    EdgeserveError                 exit 1
    ├── UsageError                 exit 2   settings that contradict each other or are out of range
    │   └── TimelineError                   times that cannot be one request's (metrics.py)
    ├── ModelError                 exit 3   the model cannot be found, fetched or loaded
    │   ├── ModelNotFoundError
    │   ├── DownloadError
    │   ├── GGUFError                       the file is not a usable GGUF model
    │   └── OutOfMemoryError       exit 6   it does not fit; says what was wanted and what is free
    ├── RuntimeUnavailableError             llama-cpp-python is missing, broken or outside the tested range
    ├── ServerUnreachableError     exit 4
    ├── ThresholdMissedError       exit 5   a benchmark's --fail-if held
    └── RequestError                        one request's failure; carries HTTP status, type and code
        ├── InvalidRequestError    400
        │   └── ContextLengthError 400      code context_length_exceeded, both counts
        ├── AuthenticationError    401
        ├── ForbiddenError         403
        ├── NotFoundError          404
        ├── QueueFullError         429      carries retry_after_s and the cause
        │   └── QueueTimeoutError  429      waited as long as it may, and was never started
        ├── RequestTimeoutError    504      its deadline passed, or a server stayed silent
        ├── UnavailableError       503      loading, draining or stopped
        ├── EngineError            500      a decode failed; this request's cells were freed
        ├── RemoteError                     what another server answered, with its status (stream_events.py)
        └── StreamBrokenError               its stream ended before the answer did (stream_events.py)
"""

from __future__ import annotations


class EdgeserveError(Exception):
    """Root. `message` is one sentence on what is wrong, `hint` one on the remedy ("" when there is none)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UsageError(EdgeserveError):
    """Settings that contradict each other or are out of range."""

    exit_code = 2


class ModelError(EdgeserveError):
    """The model cannot be found, fetched or loaded."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """No file, list entry or hub repository answers to this reference."""


class DownloadError(ModelError):
    """A download failed, was cut, or did not have the expected size or hash."""


class GGUFError(ModelError):
    """The file is not a GGUF model that can be used (truncated, not GGUF, projector, big-endian, ...)."""


class OutOfMemoryError(ModelError):
    """It does not fit. The message says what could not be had, how much was wanted and how much is free."""

    exit_code = 6


class RuntimeUnavailableError(EdgeserveError):
    """llama-cpp-python is missing, does not start, or is outside the tested range."""


class ServerUnreachableError(EdgeserveError):
    """No server answers at the address."""

    exit_code = 4


class ThresholdMissedError(EdgeserveError):
    """A condition given with --fail-if held."""

    exit_code = 5


class RequestError(EdgeserveError):
    """One request's failure. Only ever concerns the request that it is raised for.

    `status` is the HTTP status, `type` and `code` the strings that OpenAI clients match on, `param` the
    offending field, `extra` further fields of the error object (numbers that a client may want to read).
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, int | float | str] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.param = param
        self.extra = extra or {}
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """The request is malformed or asks for something out of range."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt (plus the output asked for) is longer than one sequence may be."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int, hint: str = "") -> None:
        super().__init__(
            f"This prompt has {n_prompt_tokens} tokens; one request may hold at most {n_ctx}"
            " (prompt and answer together).",
            hint,
            param="messages",
            extra={"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx},
        )


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """A Host or Origin that this server does not answer to."""

    status = 403
    type = "permission_error"


class NotFoundError(RequestError):
    """No such path, model or request."""

    status = 404
    type = "not_found_error"


class QueueFullError(RequestError):
    """The waiting queue has no room; `retry_after_s` is when it is worth trying again, `cause` what those who
    wait lack: sequences, cells, or budget (of waiting prompt tokens)."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(
        self, message: str, retry_after_s: float, hint: str = "", *, cause: str = "sequences"
    ) -> None:
        super().__init__(message, hint, extra={"cause": cause, "retry_after_s": round(retry_after_s, 1)})
        self.retry_after_s = retry_after_s
        self.cause = cause


class QueueTimeoutError(QueueFullError):
    """The request waited as long as it may without being started."""

    code = "queue_timeout"


class RequestTimeoutError(RequestError):
    """The request ran into its deadline, or a server stayed silent for too long."""

    status = 504
    type = "timeout_error"
    code = "timeout"


class UnavailableError(RequestError):
    """The engine is loading, draining or stopped."""

    status = 503
    type = "unavailable_error"
    code = "unavailable"


class EngineError(RequestError):
    """A decode failed. The request's cells were freed; other requests go on."""

    status = 500
    type = "server_error"
    code = "engine_error"
