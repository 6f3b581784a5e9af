"""A run from outside: its log, the machine beside it, and the page that is left of an afternoon.

formats     what people and frameworks write while a training runs, as rows of numbers with their lines
read_log    the public function: which run, which course, judged by `verdict`, as every loss is
monitor     the machine beside the steps: card, processor, memory, disk, network
incident    the reports of an afternoon as a page in five parts
rules       what a log or a machine shows for certain, and the catalogue pages
"""

from __future__ import annotations
