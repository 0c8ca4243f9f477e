"""The rules for tokenizers."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

VOCABULARY = Rule(
    "vocabulary: token ids are whole numbers from 0 to vocab_size - 1",
    "return ids of the vocabulary alone, and let vocab_size be one more than the largest id; "
    "leave vocab_size out if the tokenizer does not know it",
)
TOKEN_BYTES = Rule(
    "token bytes: vocabulary() has the bytes of each token",
    "return the bytes that a token adds to the text, possibly a part of a character; grammars "
    "decide by "
    "it which tokens may come next",
)
ROUND_TRIP = Rule(
    "round trip: decoding the result of encode gives the text again",
    "encode text outside of all tokens as bytes; set lossless = False in the suite if the "
    "tokenizer normalizes text on purpose",
)
STREAM = Rule(
    "stream: the pieces of decode_stream add up to the result of decode",
    "hold back the bytes of an incomplete character, start after the prompt's last token, and "
    "skip special tokens exactly if skip_special_tokens is true",
)
STREAMS_APART = Rule(
    "streams apart: a stream depends on its own tokens only",
    "keep everything that a stream remembers in the object that decode_stream returns",
)
DETERMINISTIC = Rule(
    "deterministic: the same call returns the same, in a new instance too",
    "depend on the files, the options and the arguments alone",
)
THREADS = Rule(
    "threads: encode, decode and streams may run in several threads at once",
    "keep the data of a call in local variables, or take a lock",
)
CHAT = Rule(
    "chat: apply_chat_template returns text, or raises RequestError",
    "raise RequestError, with a message for the caller, for every conversation that the "
    "template cannot render",
)
EOS = Rule(
    "eos: an end-of-sequence token is a token of its own",
    "name special tokens only, which stand for no text",
)
SPECIAL = Rule(
    "special tokens: each is encoded as its id alone, and decoded to its text",
    "name in special_tokens only texts that encode finds as one token in any text",
)
UNKNOWN = Rule(
    "unknown tokens: ids that only the model has are decoded as no text",
    "skip ids from vocab_size on: models often have more rows than the tokenizer has tokens",
)
PAIRS = Rule(
    "pairs: the texts of a pair have the tokens that each has alone",
    "encode each text by itself, put special tokens around the two, and return the range of each "
    "text; raise RequestError for texts that cannot be encoded, and leave encode_pair out if the "
    "tokenizer takes no pairs",
)
READS_ONLY = Rule(
    "reads only: token ids and messages stay as they are",
    "work on a copy",
)
