"""The tokenizer of the built-in base: byte-level BPE that gives every frequent word one token.

Invariant: decoding what was encoded gives the text back exactly, whatever the text. Encoding adds no token.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from scripts.tiny_base.corpus import conversations
from scripts.tiny_base.facts import vocabulary_words

BOS: Final = "<|start|>"
EOS: Final = "<|end|>"
PAD: Final = "<|pad|>"
HEADERS: Final = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS: Final = (PAD, BOS, EOS, *HEADERS.values())
VOCABULARY_SIZE: Final = 3200
NUM_TEXTS: Final = 4000
WORD_WEIGHT: Final = 100

# A word, one digit or a run of other signs, each with one space before it if there is one; or white space.
_PIECES: Final = r" ?\p{L}+| ?\d| ?[^\s\p{L}\d]+|\s+"

CHAT_TEMPLATE: Final = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|system|>Tools: ' + (tools | tojson) + eos_token }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the roles of this chat template are system, user and assistant, not '"
    " + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def training_texts(seed: int) -> Iterator[str]:
    """The text of many turns, and each word of the vocabulary many times over."""
    for conversation in islice(conversations(seed), NUM_TEXTS):
        yield from (turn.text for turn in conversation)
    for word in vocabulary_words():
        yield from [word] * WORD_WEIGHT


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer, of `VOCABULARY_SIZE` tokens. Raises ValueError if a vocabulary word is not one token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=10,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer)
    split = [word for word in vocabulary_words() if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise ValueError(f"{len(split)} words are more than one token, such as {split[:5]}; raise VOCABULARY_SIZE")
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(HEADERS.values()),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="right",
    )
