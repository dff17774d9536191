"""Text as it is decided: whole characters only, up to a stop string, in constant work a token.

A token may be half a character, and what follows may finish it.  So ids wait in a window until
their text cannot change any more; then it is shown, and the window begins anew.  Of what could be
shown, an end that could become a stop string waits, too:

      ids      41  17  230  184  173  10          shown  "x = "   "中"   "\n"
      window   .........[ half  half  whole ]

Tests: tests/test_streaming.py.
"""

from nanogeex.tokenizer import CodeGeeXTokenizer, CodeTokenizer

LONG, TAIL = 64, 8      # ids of a window that is cut though its end may change; what is left of it


class TextStream:
    """Call it with each id, and `end` at last: the parts that they return are the text, which ends
    before the first of the `stops`."""

    def __init__(self, tokenizer: CodeTokenizer | CodeGeeXTokenizer, prompt: list[int],
                 stops: list[str] = ()):
        self.tokenizer, self.stops = tokenizer, stops
        self.window = prompt[-TAIL:]                    # a character may begin in the prompt
        self.shown = len(tokenizer.decode(self.window))         # characters of the window's text
        self.waiting = ""                               # may be the beginning of a stop string
        self.stopped = False

    def __call__(self, token: int) -> str:
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        if not self.tokenizer.may_change(text):
            part, self.window, self.shown = text[self.shown:], [], 0
            return self._up_to_a_stop(part)
        if len(self.window) >= LONG:                    # a run of what are no characters: no token
            head, tail = self.window[:-TAIL], self.window[-TAIL:]      # to come reaches so far back
            settled = self.tokenizer.decode(head)
            if settled + self.tokenizer.decode(tail) == text:
                part, self.window, self.shown = settled[self.shown:], tail, 0
                return self._up_to_a_stop(part)
        return ""

    def end(self) -> str:
        """What is still held back."""
        if self.stopped:
            return ""
        part = self._up_to_a_stop(self.tokenizer.decode(self.window)[self.shown:])
        return part if self.stopped else part + self.waiting

    def _up_to_a_stop(self, part: str) -> str:
        text = self.waiting + part
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self.waiting = True, ""
            return text[:min(found)]
        begun = max((n for stop in self.stops for n in range(1, len(stop))
                     if text.endswith(stop[:n])), default=0)
        self.waiting = text[len(text) - begun:]
        return text[:len(text) - begun]
