-- What is rejected in each cell of (sign of the advantage, sign of the log-ratio): a rejected
-- token with advantage > 0 and log-ratio < 0 is one that the loss wanted to bring back.
select
    sign(advantage)::int as advantage_sign,
    sign(log_ratio)::int as log_ratio_sign,
    count(*) as tokens,
    avg((not kept)::int) as rho_mask,
    avg(clipped::int) as clip_fraction,
    avg(log_ratio * log_ratio) as second_moment
from trained_tokens
group by 1, 2
order by 1, 2
