"""The oracle: is it the same training?"""
