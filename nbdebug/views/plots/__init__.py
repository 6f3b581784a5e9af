"""The pictures of a report: one file a kind of `Plot`. Read one of them with `marks`, which all are made of.

    histogram tree run losses memory ranges gradients stepper gallery times   a kind, and the file that a `Plot` names
    axes            scales, rules and axes of what runs over steps
    marks           lines, bars, dots, text …, and the SVG of them
    figure          the same marks with matplotlib: `report.figure()`

A kind's file has `read(data)`: the picture of plain data, or None where there is nothing in it to draw. A picture has
`sentence()`, itself in words, and `drawing()`, its marks. Its file is imported only where a report has one.
"""
