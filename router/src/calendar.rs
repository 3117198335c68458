//! Dates for chat templates (`strftime_now`): UTC, and the formats that
//! published templates use.

/// Formats `unix_seconds` as Python's `strftime` would, in UTC and in English.
/// Directives that no template is known to use stay as they are.
pub(crate) fn strftime(format: &str, unix_seconds: u64) -> String {
    let date = Date::of(unix_seconds);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        match characters.next() {
            Some(directive) => text.push_str(&date.directive(directive)),
            None => text.push('%'),
        }
    }
    text
}

struct Date {
    year: u64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: u64,
    /// 0 is Sunday.
    weekday: usize,
    /// 1 to 366.
    day_of_year: u64,
    second_of_day: u64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const DAY_SECONDS: u64 = 86_400;

impl Date {
    fn of(unix_seconds: u64) -> Self {
        let days = unix_seconds / DAY_SECONDS;
        let mut year = 1970;
        let mut left = days;
        while left >= year_days(year) {
            left -= year_days(year);
            year += 1;
        }
        let day_of_year = left + 1;
        let mut month = 1;
        while left >= month_days(year, month) {
            left -= month_days(year, month);
            month += 1;
        }
        let weekday = ((days + 4) % 7) as usize;
        Self { year, month, day: left + 1, weekday, day_of_year, second_of_day: unix_seconds % DAY_SECONDS }
    }

    fn directive(&self, directive: char) -> String {
        let (hour, minute) = (self.second_of_day / 3600, self.second_of_day / 60 % 60);
        let second = self.second_of_day % 60;
        let (month, weekday) = (MONTHS[self.month - 1], WEEKDAYS[self.weekday]);
        match directive {
            'Y' => format!("{:04}", self.year),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => (if hour < 12 { "AM" } else { "PM" }).into(),
            'B' => month.into(),
            'b' | 'h' => month[..3].into(),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'F' => format!("{:04}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            '%' => "%".into(),
            other => format!("%{other}"),
        }
    }
}

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_days(year: u64) -> u64 {
    if leap(year) { 366 } else { 365 }
}

fn month_days(year: u64, month: usize) -> u64 {
    match month {
        2 if leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_that_python_prints() {
        let format = "%d %b %Y %A %H:%M:%S %j %y %B %I%p %% %F";
        let cases = [
            (0, "01 Jan 1970 Thursday 00:00:00 001 70 January 12AM % 1970-01-01"),
            (951_782_399, "28 Feb 2000 Monday 23:59:59 059 00 February 11PM % 2000-02-28"),
            (951_782_400, "29 Feb 2000 Tuesday 00:00:00 060 00 February 12AM % 2000-02-29"),
            (1_735_689_599, "31 Dec 2024 Tuesday 23:59:59 366 24 December 11PM % 2024-12-31"),
            (1_750_000_000, "15 Jun 2025 Sunday 15:06:40 166 25 June 03PM % 2025-06-15"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(format, seconds), expected);
        }
    }

    #[test]
    fn unknown_directives_and_a_last_percent_stay() {
        assert_eq!(strftime("%Q 5%", 0), "%Q 5%");
    }
}
