"""Text to token ids and back, and chat templates. Knows tokenizer files; nothing of models, tensors or requests."""

from verifypd.tokenizer.control import ChatText
from verifypd.tokenizer.detokenize import DetokenizeStream
from verifypd.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatText", "DetokenizeStream", "Tokenizer"]
