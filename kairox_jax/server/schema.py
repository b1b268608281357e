"""The bodies of requests: every field that the server honours, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kairox_jax.config import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY

# Fields of OpenAI's API that the server does not have; clients that send them as null are understood.
_ABSENT = frozenset(
    "tools tool_choice functions function_call parallel_tool_calls modalities audio prediction reasoning_effort "
    "service_tier store metadata web_search_options verbosity suffix best_of tool_calls refusal annotations".split()
)
MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_STOP_CHARS = 1024  # each token looks through them
MAX_BIASED = 1024

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=16)]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in _ABSENT}


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = False


class JsonSchema(Body):
    """The schema of an answer."""

    name: str = Field(default="answer", min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Sampling(Body):
    """What both kinds of generation take."""

    model: str | None = Field(default=None, max_length=512)
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopText | StopTexts | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASED)] | None = None
    ignore_eos: bool | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    user: str | None = Field(
        default=None, description="Accepted for clients that send it; it changes nothing."
    )

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        wants_json = self.response_format is not None and self.response_format.type != "text"
        if wants_json and self.ignore_eos:
            raise ValueError("ignore_eos: true cannot go with a response_format: leave one of them out")
        return self


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(default=None, max_length=64)

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TextBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_text(self) -> TextBody:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: leave one of them out")
        return self


class TokenizeBody(Body):
    """POST /tokenize."""

    content: str
    add_special: bool = Field(default=False, description="Begin with BOS, as a prompt does.")
    with_pieces: bool = Field(default=False, description="Give each token with its text.")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]
