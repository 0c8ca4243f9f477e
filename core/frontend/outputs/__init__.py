"""Text out: what the engine returns becomes what callers get.

Text is held back in four places, in this order: `Detokenizer.update` waits for whole characters,
`RequestState.output` for as many tokens as `engine.stream_interval` wants, `Detokenizer.pop_text`
keeps the end in which a stop string may begin, and the parser behind `OutputParts.feed` what may
become a marker. Nothing is held back once a completion has ended.
"""
