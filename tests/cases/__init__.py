"""Real failures as small programs, asked and judged: `python -m tests.cases FOLDER... [--json]`.

    asking.py    in a process of its own: build a case, ask nbdebug through its public functions, note the answer
    running.py   find the cases, start those processes, and only then read EXPECT and judge
    __main__.py  the command: the table, the score, the exit status

What a case is, and what its namespace holds, is told in the README beside the cases; `judge.py` lies there too.
"""
