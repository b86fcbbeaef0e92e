"""What is given to a decoder before it speaks: start token, language, task; by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import DataError, UsageError
from .pair_options import PairOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHISPER = "whisper"
WRAPPED = ("mbart", "plbart")  # their decoder starts from the last label, which may be the language
ENGLISH_VOCABULARY = 51864  # of a Whisper that knows English only, by its size


def decoder_prompt(
    tokenizer: PreTrainedTokenizerBase,
    model_type: str,
    config: Any,
    generation: Mapping[str, Any],
    options: PairOptions,
    name: str,
) -> list[int]:
    """Ids that every target begins with.

    Args:
        tokenizer: Whose languages are set, where it has any.
        model_type: Of the stock class.
        config: With the defaults of its class.
        generation: The raw generation config.
        options: Languages and task.
        name: The model, for messages.

    Raises:
        UsageError: A language or task that the tokenizer does not have, or that must be named.
        DataError: The config does not say how the decoder starts.
    """
    if model_type == WHISPER:
        return _whisper(tokenizer, config, generation, options, name)
    if options.task != "transcribe":
        raise UsageError("is a task of Whisper's", where=f"--task {options.task}", fix="leave it out")
    start, forced = _start(tokenizer, config, generation, name), None
    if hasattr(tokenizer, "src_lang"):
        forced = _set_languages(tokenizer, options, name)
        if model_type in WRAPPED and _ends_with_language(tokenizer):
            return [forced]
    elif options.source_language or options.target_language:
        raise UsageError(
            f"the tokenizer of {name} knows no languages",
            where="--source-lang or --target-lang",
            fix="leave them out; words before the source are given with --source-prefix",
        )
    if forced is None:
        forced = generation.get("forced_bos_token_id", getattr(config, "forced_bos_token_id", None))
    return [start] if forced is None else [start, int(forced)]


def _start(tokenizer: PreTrainedTokenizerBase, config: Any, generation: Mapping[str, Any], name: str) -> int:
    candidates = (
        generation.get("decoder_start_token_id"),
        getattr(config, "decoder_start_token_id", None),
        getattr(config, "pad_token_id", None),
        tokenizer.pad_token_id,
    )
    for start in candidates:
        if isinstance(start, int):
            return start
    raise DataError("no decoder_start_token_id", where=name, fix="restore the original's config.json")


def _set_languages(tokenizer: Any, options: PairOptions, name: str) -> int:
    """Tell the tokenizer its languages; the id of the target's."""
    source = options.source_language or tokenizer.src_lang
    target = options.target_language or getattr(tokenizer, "tgt_lang", None)
    _language_id(tokenizer, source, "sources", "--source-lang", name)
    found = _language_id(tokenizer, target, "targets", "--target-lang", name)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    return found


def _language_id(tokenizer: Any, code: str | None, what: str, option: str, name: str) -> int:
    """The id of a language's token.

    Raises:
        UsageError: The tokenizer does not have the language; those that look like it are named, or some. Or none is
            named.
    """
    if code is None:
        raise UsageError(f"needs the language of the {what}", where=name, fix=f"name it with {option}")
    known = languages(tokenizer)
    if code not in known:
        raise UsageError(
            f"the tokenizer of {name} has no language {code}", where=option, fix=_some_of(known, code)
        )
    return int(tokenizer.convert_tokens_to_ids(known[code]))


def languages(tokenizer: Any) -> dict[str, str]:
    """The languages of a tokenizer, as its `src_lang` spells them, and their tokens.

    Not every token is one: `en` is also a piece of a word to NLLB, whose English is `eng_Latn`.
    """
    tokens = getattr(tokenizer, "lang_code_to_token", None)  # M2M100: `fr` is `__fr__`
    if not isinstance(tokens, Mapping):
        ids = getattr(tokenizer, "lang_code_to_id", None)  # mBART, PLBART
        codes = ids if isinstance(ids, Mapping) else tokenizer.get_added_vocab()  # all of NLLB but marks
        tokens = {code: code for code in codes if not code.startswith(("<", "["))}
    return {code: token for code, token in tokens.items() if _id(tokenizer, token) is not None}


def _some_of(known: Collection[str], code: str) -> str:
    """Languages that a code may have meant; some where none is like it."""
    if not known:
        return "use the tokenizer the model came with"
    like = [k for k in known if k.startswith(code[:2]) or code.startswith(k)]
    shown = sorted(like or known)[:8]
    more = len(known) - len(shown)
    return f"it has {', '.join(shown)}{f' and {more} more' if more else ''}"


def _ends_with_language(tokenizer: Any) -> bool:
    """Whether targets end with their language (mBART; those of mBART-50 begin with it)."""
    ids = tokenizer(text_target="a")["input_ids"]
    return bool(ids) and ids[-1] != tokenizer.eos_token_id


def _whisper(
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    generation: Mapping[str, Any],
    options: PairOptions,
    name: str,
) -> list[int]:
    names = ["<|startoftranscript|>"]
    language = options.source_language or options.target_language
    _check_written(options)
    if generation.get("is_multilingual", config.vocab_size != ENGLISH_VOCABULARY):
        if language is None:
            raise UsageError(
                "needs the language that is spoken", where=name, fix="name it with --source-lang, as en"
            )
        if options.task not in ("transcribe", "translate"):
            raise UsageError("must be transcribe or translate", where=f"--task {options.task}")
        names += [_whisper_token(tokenizer, whisper_language(language), name), f"<|{options.task}|>"]
    elif options.task != "transcribe" or (language and whisper_language(language) != "en"):
        raise UsageError("transcribes English only", where=name, fix="leave languages and --task out")
    names.append("<|notimestamps|>")
    return [_mark(tokenizer, token, name) for token in names]


def _whisper_token(tokenizer: PreTrainedTokenizerBase, code: str, name: str) -> str:
    """Whisper's token of a language.

    Raises:
        UsageError: This one's tokenizer does not have it, as those before large-v3 have no Cantonese.
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    known = [c for c in LANGUAGES if _id(tokenizer, f"<|{c}|>") is not None]
    if code not in known:
        raise UsageError(
            f"the tokenizer of {name} has no language {code}",
            where=f"--source-lang {code}",
            fix=_some_of(known, code),
        )
    return f"<|{code}|>"


def _mark(tokenizer: PreTrainedTokenizerBase, token: str, name: str) -> int:
    """The id of a mark that every Whisper has.

    Raises:
        DataError: It is missing.
    """
    found = _id(tokenizer, token)
    if found is None:
        raise DataError(
            f"its tokenizer has no {token}", where=name, fix="use the tokenizer the model came with"
        )
    return found


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """The id of a token by name, None where there is none."""
    found: Any = tokenizer.convert_tokens_to_ids(token)
    return None if found is None or found == tokenizer.unk_token_id else int(found)


def _check_written(options: PairOptions) -> None:
    """Refuse a language of the targets that Whisper does not write.

    Raises:
        UsageError: It is neither the one that is spoken, nor English from another.
    """
    source, target = options.source_language, options.target_language
    if source and target:
        written = "en" if options.task == "translate" else whisper_language(source)
        if whisper_language(target) != written:
            raise UsageError(
                "Whisper writes the language that is spoken, or English with --task translate",
                where=f"--target-lang {target}",
                fix="leave it out",
            )


def whisper_language(name: str) -> str:
    """Whisper's code of a language, given by code or English name.

    Raises:
        UsageError: It has none of that name.
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    code = TO_LANGUAGE_CODE.get(name.lower(), name.lower())
    if code not in LANGUAGES:
        raise UsageError(
            "is not a language of Whisper",
            where=f"--source-lang {name}",
            fix=_some_of(LANGUAGES, code),
        )
    return code
