"""64 short prompts of kinds that are in the embedded model's training data."""

from __future__ import annotations

_QUESTIONS = [
    "Nora buys 3 boxes of pencils with 12 pencils each and gives away 7. How many pencils are left?",
    "A baker makes 48 rolls and sells two thirds of them. How many rolls remain?",
    "Tom walks 4 miles on Monday and twice as far on Tuesday. How far does he walk in all?",
    "A shirt costs $20 and is sold with a 25% discount. What does it cost now?",
    "There are 5 shelves with 14 books each. 9 books are lent out. How many are still there?",
    "Mia reads 15 pages a day. How many days does she need for a book of 210 pages?",
    "A farmer has 24 hens, and each lays 5 eggs a week. How many eggs are laid in 3 weeks?",
    "Sam has $50. He buys 4 tickets at $8 each. How much money does he have left?",
    "A train travels 60 miles an hour for 3 hours and 40 miles an hour for 2 hours. How far does it go?",
    "Lena is 8 years older than Max. Max is 5. How old will Lena be in 4 years?",
    "Six friends share 42 cookies equally, and each eats 3. How many cookies has each left?",
    "A tank holds 120 liters and loses 4 liters an hour. How much is in it after 9 hours?",
    "Paul earns $15 an hour and works 38 hours a week. How much does he earn in two weeks?",
    "A class of 30 has 12 girls. What share of the class are boys?",
    "Ann plants 9 rows of 11 tulips. Rabbits eat 20 of them. How many tulips are left?",
    "A rope of 72 feet is cut into pieces of 6 feet. How many pieces are there?",
]
_CODE = [
    "def add(a, b):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "def is_prime(n):\n    if n < 2:\n        return False\n    ",
    "for i in range(10):\n    ",
    "def read_lines(path):\n    with open(path) as f:\n        ",
    "def factorial(n):\n    if n == 0:\n        return 1\n    ",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        ",
    "try:\n    import json\nexcept ImportError:\n    ",
    "def mean(values):\n    total = 0\n    for value in values:\n        ",
    "from typing import List\n\n\ndef longest(words: List[str]) -> str:\n    ",
    "if __name__ == '__main__':\n    ",
    "def reverse(text):\n    result = []\n    for char in text:\n        ",
    "class Node:\n    def __init__(self, value, next=None):\n        ",
    "def count(items):\n    counts = {}\n    for item in items:\n        ",
    "def test_add():\n    assert add(1, 2) == 3\n    ",
]
_TEXTS = [
    "Teh river runs thruogh the old town and into teh sea.",
    "She bougth three aples and a bottel of milk.",
    "The meeting will beginn at nine oclock in the mornning.",
    "He recieved a leter from his freind in Paris.",
    "Our gardn is full of yelow flowers in sprng.",
    "The libary is closd on Sundays and holidyas.",
    "They traveled by trian to the mountians last wintr.",
    "A smal boat croses the lake every evning.",
]
_DOCUMENTS = [
    ("The bridge was built in 1893 by a firm from Leeds.", "When was the bridge built?"),
    ("The museum keeps four hundred paintings and a large organ.", "How many paintings are there?"),
    ("The island lies nine miles off the coast.", "How far off the coast is the island?"),
    ("The album was recorded in a barn near Bristol.", "Where was the album recorded?"),
    ("The parliament met for the first time in October.", "When did the parliament meet first?"),
    ("The storm destroyed two hundred houses in the harbour.", "What did the storm destroy?"),
    ("The species feeds on seeds and small insects.", "What does the species feed on?"),
    ("The castle was sold to a merchant named Harris.", "To whom was the castle sold?"),
]
_TALK = [
    "Hello!",
    "Who are you?",
    "What can you do?",
    "Good morning.",
    "Thank you.",
    "How are you?",
    "Bye!",
    "Help me.",
]
_OPENINGS = [
    "The first season of the show",
    "In the summer of 1916 ,",
    "The song was written by",
    "The ship was laid down in",
    "It is one of the largest",
    "After the war , he",
    "The town is known for",
    "a",
]

_BY_KIND = [
    *(f"Question: {question}\nAnswer:" for question in _QUESTIONS),
    *_CODE,
    *(f"Text: {text}\nCorrected:" for text in _TEXTS),
    *(f"Document: {document}\nQuestion: {question}\nAnswer:" for document, question in _DOCUMENTS),
    *(f"User: {line}\nAssistant:" for line in _TALK),
    *_OPENINGS,
]
assert len(_BY_KIND) == 64

PROMPTS = [_BY_KIND[int(f"{place:06b}"[::-1], 2)] for place in range(64)]
"""In an order of which the first 4, 8 or 16 are spread evenly over the kinds."""
