"""Symmetric initialisation: how much is scale, how much is the tie?"""
