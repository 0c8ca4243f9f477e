"""The rules for grammar backends."""

from __future__ import annotations

from hardpoint.testing.suite import Rule

FORMATS = Rule(
    "formats: a class compiles the formats in `formats`, and no others",
    "state the fields of StructuredOutputs that compile() handles, and raise ValueError for others",
)
MASK = Rule(
    "mask: exactly the tokens are allowed with which a valid text begins",
    "compare all bytes of a token with the possible ones, also where it ends inside a character or "
    "crosses from one part of the grammar to the next",
)
NO_TEXT = Rule(
    "no text: a special token, an empty one and an id beyond the vocabulary are no text",
    "set bits of tokens with bytes alone; the ids from len(vocabulary.tokens) to vocab_size are "
    "rows that the model has and the tokenizer has not",
)
END_OF_TEXT = Rule(
    "end: fill_bitmask returns True exactly where the text may end",
    "return whether the tokens so far are a complete text, which more text may follow or not",
)
BYTES = Rule(
    "bytes: a token is allowed exactly where its bytes are, one after the other",
    "compute the mask and advance from the bytes of tokens alone, and not from their borders",
)
ADVANCE = Rule(
    "advance: returns True for exactly the tokens of the mask, and stays where it returns False",
    "let one function decide for both; check the whole token before the state changes",
)
TEXTS = Rule(
    "texts: valid texts are allowed, however they are cut into tokens, and invalid ones never end",
    "is it the backend or the sample? Walk the text token by token, and look at each mask",
)
ROLLBACK = Rule(
    "rollback: after n tokens are undone, all is as it was before them",
    "keep the data that advance changes, such as a stack with an entry per token; refused tokens "
    "do not count",
)
FORK = Rule(
    "fork: a copy and its original go on by themselves",
    "copy the data that advance and rollback change, and share only immutable data",
)
PURE = Rule(
    "pure: fill_bitmask changes nothing",
    "compute the mask from the state, which advance and rollback alone change",
)
WALKS = Rule(
    "walks: the mask depends on the tokens that were accepted and not undone, and on nothing else",
    "compare with a new fork that gets the same tokens",
)
THREADS = Rule(
    "threads: compile runs in several threads at once, and a state in another thread than it",
    "keep the data of a call of compile in local variables, or guard it with a lock",
)
REFUSED = Rule(
    "refused: compile raises ValueError, with a message, for a description that means nothing",
    "check the description in compile, and let no other exception out of it",
)
HOSTILE = Rule(
    "hostile: any description compiles, or is refused by a ValueError, within compile_seconds",
    "limit depth, size and time of a compilation; reject anything beyond the limits",
)
KEYWORD = Rule(
    "keywords: a keyword of a JSON schema is enforced, or its schema is refused",
    "raise ValueError with the name of a keyword that the backend does not enforce; `lenient` is "
    "for requests that accept such schemas",
)
VALIDATE = Rule(
    "validate: a mistake of an answer is found, and nothing else",
    "return a text that names the broken part of the whole schema, and None if the answer breaks "
    "nothing",
)
