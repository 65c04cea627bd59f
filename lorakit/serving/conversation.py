"""A conversation with a base and its adapters, whose turns may be answered by different ones."""

import queue
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, final

from lorakit.decoding.generation import Item
from lorakit.decoding.sampling import SamplingSettings
from lorakit.errors import LorakitError
from lorakit.inference.adapted_model import AdaptedModel
from lorakit.patch.prompting import PromptForm
from lorakit.serving.answer import ChoiceStream
from lorakit.serving.engine import CHAT_TOKENS, ServingEngine


@final
@dataclass
class Conversation:
    """Messages so far, and who answers next.

    adapter: None for the base. system: goes after the system prompt of the adapter's rows, if they had one. settings:
    ``max_tokens`` is fewer where the base has fewer positions left.
    """

    model: AdaptedModel
    engine: ServingEngine
    adapter: str | None = None
    system: str | None = None
    settings: SamplingSettings = field(default_factory=lambda: SamplingSettings(max_tokens=CHAT_TOKENS))
    messages: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to a user's text in pieces. The turn is part of the conversation when it ends.

        When the iteration is closed before its end, the answer is cancelled, and what was yielded of it stays.
        Raises LorakitError: the conversation does not fit the base any more, or the engine failed; the turn is left
        out.
        """
        adapter = self.model.adapter(self.adapter)
        codec = self.model.codec(adapter)
        form = codec.form
        reply = {"role": "assistant", "content": ""}
        turns = [{"role": "user", "content": text}, reply]
        system = [one for one in (form.system, self.system) if one is not None]
        start = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        prompt = text if form.raw else [*start, *self.messages, turns[0]]
        ids = codec.token_ids(prompt, PromptForm(form.raw))
        free = self.engine.max_positions - len(ids)
        if free < 1:
            raise LorakitError(
                f"the conversation has {len(ids)} tokens, and at most {self.engine.max_positions} fit: begin anew"
            )
        settings = replace(self.settings, max_tokens=int(min(free, self.settings.max_tokens)))
        items = queue.SimpleQueue[tuple[ChoiceStream, Item]]()
        choice = ChoiceStream(ids, adapter, codec, settings)
        choice.start(self.engine, items.put)
        try:
            while choice.reason is None:
                piece = choice.add(items.get()[1]).text
                reply["content"] += piece
                yield piece
        except LorakitError:
            turns = []
            raise
        finally:
            choice.cancel()
            self.messages += turns
