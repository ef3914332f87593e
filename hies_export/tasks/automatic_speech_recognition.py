"""The words of speech, by encoder-decoders such as Whisper."""

from __future__ import annotations

from .text2text_generation import Text2TextGeneration


class AutomaticSpeechRecognition(Text2TextGeneration):
    """Encoder-decoders that write down speech."""

    name = "automatic-speech-recognition"
    auto_class = "AutoModelForSpeechSeq2Seq"
    inputs = "input_features (or the model's other input) and labels"
    text = False
    on_hub = True
