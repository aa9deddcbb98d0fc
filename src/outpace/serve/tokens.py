"""``/tokenize`` and ``/detokenize``, as vLLM's: texts and conversations as token ids, and back."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from outpace.serve.chat import Conversation, template_message
from outpace.serve.continuing import prompt_of
from outpace.serve.errors import Refused
from outpace.serve.fields import Tokens, Wire
from outpace.serve.formats import json_response
from outpace.serve.service import Service


class Tokenize(Wire):
    """``POST /tokenize``: a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    add_special_tokens: bool | None = None  # by default to a prompt, since templates contain them
    add_generation_prompt: bool | None = None  # of messages, by default
    continue_final_message: bool | None = None
    return_token_strs: bool = False


class Detokenize(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Tokens


async def tokenize(service: Service, body: Tokenize, tenant: str | None) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise Refused(400, "give prompt or messages", "prompt")
    if body.messages is not None and body.add_special_tokens:
        raise Refused(400, "the template adds the special tokens; leave it out", "add_special_tokens")
    for name in ("add_generation_prompt", "continue_final_message"):
        if body.prompt is not None and getattr(body, name):
            raise Refused(400, "it is of messages; give them, or leave it out", name)

    async def read() -> Response:
        if body.prompt is not None:
            tokens = await service.prompts.tokens(body.prompt, body.add_special_tokens is not False)
        else:
            turns, _ = await asyncio.to_thread(
                lambda: service.dialogue.prepared([template_message(one) for one in body.messages or ()], ())
            )
            tokens = (await prompt_of(service, body, turns, {})).tokens
        return await asyncio.to_thread(written, tokens)

    def written(tokens: list[int]) -> Response:
        texts = service.model.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": service.defaults.context, "tokens": tokens}
        return json_response(found | {"token_strs": texts})

    return await service.work(read)


async def detokenize(service: Service, body: Detokenize, tenant: str | None) -> Response:
    async def write() -> Response:
        text = await asyncio.to_thread(
            lambda: service.model.tokenizer.decode(service.prompts.check_tokens(body.tokens))
        )
        return json_response({"prompt": text})

    return await service.work(write)
