"""The table `[server]` of the configuration, with `[server.limits]`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from hardpoint.typed import Strict

__all__ = ["ServerConfig", "ServerLimits"]

Count = Annotated[int, Meta(ge=1)]
# Timers of the system take no more.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e9)]


class ServerLimits(Strict):
    """Limits of a request to the HTTP server; a larger one is answered with 400 or 413.

    Attributes:
        body_bytes: size of a request's body; None is 8 MiB and, of a model that takes images,
            `images.max_total_bytes` as base64 besides.
        buffered_bytes: size of all bodies above 64 KiB that are not yet used, and of such messages
            of WebSockets that are not whole, together; further ones are answered with 503. Those
            of one key may have half of it. One alone may have `body_bytes` in any case.
        items: commas of a body, and 8 for each opening bracket, those in its texts too.
        header_bytes: size of its request line and headers; also of the chunk extensions and
            trailers of its body, which may have 8 bytes more for each byte of the body.
        connections: connections that are open at once; for a further one, idle connections are
            closed, or it is answered with 503 if there are none.
        depth: levels of arrays and objects in one another, in a body.
        requests: requests that are being answered at once; further ones are answered with 429.
        requests_per_key: those of one key; further ones are answered with 429. None is three
            quarters of `requests`.
        conversations: conversations that a key has open at once on `/inference/v1/sessions`, or all
            clients together where no key is needed; further ones are answered with 429.
        prompts: prompts in one request.
        prompt_characters: length of all texts of a request; None is 32 for each token of
            `max_model_len`.
        n: completions of a prompt.
        max_tokens: None is what fits into the context.
        logprobs: likeliest tokens per position, of prompts too.
        stop: stop strings, of 65536 characters in all, and stop token ids.
        bad_words: strings that must not be produced, of 65536 characters in all.
        logit_bias: tokens with a bias, and tokens that are allowed.
        messages: messages of a conversation.
        tools: tools that the model may call.
        schema_bytes: size of a JSON schema or grammar, of all tools together too.
        timeout_seconds: for one request; None is no limit.
    """

    body_bytes: Count | None = None
    buffered_bytes: Count = 128 << 20
    items: Count = 1 << 20
    header_bytes: Count = 64 << 10
    connections: Count = 4096
    depth: Annotated[int, Meta(ge=1, le=200)] = 128
    requests: Count = 1024
    requests_per_key: Count | None = None
    conversations: Count = 1024
    prompts: Count = 1024
    prompt_characters: Count | None = None
    n: Count = 128
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0)] = 20
    stop: Annotated[int, Meta(ge=0)] = 64
    bad_words: Annotated[int, Meta(ge=0)] = 1024
    logit_bias: Annotated[int, Meta(ge=0)] = 4096
    messages: Count = 4096
    tools: Count = 256
    schema_bytes: Count = 1 << 18
    timeout_seconds: PositiveSeconds | None = None


class ServerConfig(Strict):
    """The HTTP server of `hardpoint serve`.

    Attributes:
        host: address that it listens on.
        port: 0 is any free one.
        uds: path of a Unix socket to listen on instead.
        uds_mode: permissions of its file, in octal digits.
        root_path: prefix of its paths at the proxy before it.
        served_names: names of the model; by default `model`.
        keys_file: TOML file of the users' keys; None needs no key.
        open_routes: routes that need no key, even if there are keys.
        allowed_hosts: names that requests may address the server by; None is loopback names and
            the bound address. "*" is any.
        allowed_origins: origins of web pages that browsers let use the server, in addition
            to its own.
        tls_certificate, tls_key: PEM files; with them it speaks HTTPS.
        admin: address of the admin routes: "unix:PATH", or "HOST:PORT", which needs
            `admin_keys_file`; None serves no admin routes.
        admin_keys_file: TOML file of the administrators' keys.
        unknown_fields: "warn" ignores unknown fields of requests, logs and counts them, and lists
            them in the header `x-hardpoint-ignored-fields`; misspelled names are errors. "error"
            rejects requests with unknown fields. Those of messages, tool definitions and content
            parts are ignored in both cases.
        hosted_tools: "ignore" leaves hosted tools, such as `web_search`, out of requests to
            `/v1/responses` with a warning; "reject" rejects these requests.
        replace_routes: paths of the server's own routes that plugins may replace.
        extension_seconds: maximum time that an authenticator, a transform or a middleware of a
            plugin may take for a request, without what it wraps; and a route of a plugin until its
            answer begins, without what it waits for in `read` and `while_connected`.
        adapter_folders: folders that administrators may load adapters from.
        weight_folders: folders that administrators may load weights from.
        prompt_embeds: whether prompts may be embeddings; `plugin.prompt_embeddings.enabled` has to
            be set, too.
        trace: whether all clients may ask how the tokens of their requests were chosen (`trace`);
            if not, those whose keys have `trace = true`.
        tokenizer_info: whether `/tokenizer_info` describes the tokenizer, with its chat templates.
        page: whether `/` is a web page, and `/docs` another one that describes the routes.
        access_log: log of requests, on standard error.
        heartbeat_seconds: time without an event after which a stream gets a comment, so that no
            proxy ends it; 0 is never.
        header_seconds: maximum time from a connection to the end of a request's headers.
        body_seconds: maximum time between two parts of a request's body, and for all of it, with
            a second more for each 10000 bytes that came; also of a message of a WebSocket.
        send_seconds: maximum time that a client may leave an answer unread.
        keep_alive_seconds: time for which an idle connection is kept. It exceeds the idle limits of
            usual clients and proxies, which close the connection first: otherwise, a request may
            reach a connection that the server is closing, and is reset.
        drain_delay: time to serve on after SIGTERM while `/ready` answers 503.
        drain_seconds: time for requests to finish after that.
        workers: processes that answer requests, with the same engines and limits.
        restart: whether a dead engine is restarted; if not, the server ends.
        limits: limits of requests.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    uds: Annotated[str, Meta(min_length=1)] | None = None
    uds_mode: Annotated[str, Meta(pattern="^0?[0-7]{3}$")] = "0600"
    root_path: str = ""
    served_names: list[Annotated[str, Meta(min_length=1)]] = []
    keys_file: str | None = None
    open_routes: list[str] = field(default_factory=lambda: ["/health", "/ready", "/ping", "/"])
    allowed_hosts: list[str] | None = None
    allowed_origins: list[str] = []
    tls_certificate: str | None = None
    tls_key: str | None = None
    admin: str | None = None
    admin_keys_file: str | None = None
    unknown_fields: Literal["error", "warn"] = "warn"
    hosted_tools: Literal["ignore", "reject"] = "ignore"
    replace_routes: list[str] = []
    extension_seconds: PositiveSeconds = 10.0
    adapter_folders: list[Annotated[str, Meta(min_length=1)]] = []
    weight_folders: list[Annotated[str, Meta(min_length=1)]] = []
    prompt_embeds: bool = False
    trace: bool = False
    tokenizer_info: bool = False
    page: bool = True
    access_log: Literal["text", "json", "off"] = "text"
    heartbeat_seconds: Seconds = 15.0
    header_seconds: PositiveSeconds = 10.0
    body_seconds: PositiveSeconds = 30.0
    send_seconds: PositiveSeconds = 60.0
    keep_alive_seconds: PositiveSeconds = 75.0
    drain_delay: Seconds = 0.0
    drain_seconds: Seconds = 30.0
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    restart: Literal["never", "on_failure"] = "on_failure"
    limits: ServerLimits = ServerLimits()
