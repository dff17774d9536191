"""Lookup decoding: code repeats itself, so a draft of what follows is copied from what was there.

      ... for i in range(n): ... for i in ra          the last tokens occurred before:
              ~~~~~~~~ -------------  ~~~~~~~~        what followed them then is the draft

One forward over the last token and the draft gives the logits after each of them.  The draft is
read along as long as it is what would have been chosen; the first other choice ends it, and is
the next token itself.  So all choices are those of decoding token by token, whatever the draft; a
wrong draft costs time, a right one saves forwards (arXiv:2304.04487; any draft: arXiv:2211.17192).

Tests: tests/test_lookup.py.
"""

MATCH = 3               # tokens that must have occurred before; fewer match by chance
LONGEST_WAIT = 63


class Lookup:
    """The text so far, and where each run of MATCH tokens was last followed by something."""

    def __init__(self, ids: list[int], longest: int):
        self.longest, self.size = longest, min(longest, 2)
        self.wait, self.next = 0, 0             # tokens between drafts; place of the next
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}
        self.extend(ids)

    def extend(self, ids: list[int]) -> None:
        for token in ids:
            if len(self.ids) >= MATCH:
                self.after[tuple(self.ids[-MATCH:])] = len(self.ids)
            self.ids.append(token)

    def draft(self) -> list[int]:
        """At most `size` tokens, often none."""
        at = self.after.get(tuple(self.ids[-MATCH:]))
        if at is None or len(self.ids) < self.next:
            return []
        period = len(self.ids) - at             # what is at the end may go round and round
        return [self.ids[at + i % period] for i in range(self.size)]

    def judge(self, drafted: int, right: int) -> None:
        """The text tells how far it repeats itself.  A draft that was right to its end makes the
        next one longer, another shorter; after one of which nothing was right comes a pause, each
        time longer, so that drafts cost little where the text is new."""
        if drafted:
            self.size = min(self.longest, 2 * self.size) if right == drafted else max(1, right)
            self.wait = 0 if right else min(LONGEST_WAIT, 2 * self.wait + 1)
            self.next = len(self.ids) + 1 + self.wait           # 1: the token that came instead
