"""Repeat the experiments of the papers: one command each, one record for each training, one page of all.

    python -m benchmarks.reproduce [methods dryden lam sievert qsgd gpt] [--full] [--seeds N] [--jobs N]

A record holds what was trained, with which versions and where, and is not made twice: an interrupted run goes on with
what is missing. `docs/reproductions.md` is made of the records and of the prose in `page.md`, beside this file.
"""
