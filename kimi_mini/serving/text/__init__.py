"""Text at the edge of the engine, which itself knows token ids only.

tokenizer.py         the contract of a tokenizer and of its stream
utf8.py              bytes -> text, never half a character
byte_level.py        the miniature's own tokenizer: UTF-8 bytes
hf_json.py           a checkpoint's tokenizer.json
pieces.py            text of tokens that know only their neighbour: what hf_json streams with
tiktoken_bpe.py      a checkpoint's tiktoken.model, in Kimi's layout
tokenizer_config.py  what a checkpoint declares of its special tokens
stop.py              stop strings, across any cut of the text
opening.py           which of these a folder asks for; the ids that end a sequence
"""
