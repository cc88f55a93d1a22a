"""Every row of the README's "Measured" table, measured and written down: `benchmarks/claims.json`.

    claim.py    a row: what it says, the run that measures it, how its figures are read and written
    rows.py     all rows
    run.py      one run of a benchmark, and why it cannot be made here
    guard.py    the process between: it ends a run that nobody waits for any more
    record.py   what is known of a row, and the file of all
    history.py  commits: of the code that is measured, and the last change of what a row depends on
    measure.py  runs one after the other, each kept as soon as it ends
    page.py     the README's section, from the file

`python -m benchmarks.claims` is the command (`__main__.py`).
"""
