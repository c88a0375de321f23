"""What the decks draw beyond their chapters' figures: a module per deck, a function per drawing.

A function takes nothing and returns a matplotlib figure; what it shows is computed by
`minitron.cost` or by the package's own schedules and plans. A deck asks for it by its name:
`![w:1000 alt](teaching.slides.ch02:second_step)` (tools/build_slides.py).
"""
