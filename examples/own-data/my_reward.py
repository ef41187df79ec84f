"""A reward of one's own: did the model copy the two numbers into its call?"""


def copied(reply, answer):
    return float(reply == answer)
