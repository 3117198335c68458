//! Which arm is measured when.

/// How long prompts are to be prefilled. On Segue this is the request header `x-segue-prefill`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Arm {
    /// The router decides.
    Auto,
    /// Everything on the decode node: the control.
    Local,
    /// Everything through a prefill node, short prompts too.
    Remote,
    /// No header: for servers that are not Segue.
    Plain,
}

impl Arm {
    /// The name on the command line and in the files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Remote => "remote",
            Self::Plain => "plain",
        }
    }

    /// The value of `x-segue-prefill`, if the arm sends one.
    pub fn header(self) -> Option<&'static str> {
        (self != Self::Plain).then(|| self.name())
    }
}

/// The order of all measurements as (repetition, arm): A B, then B A, then A B again, so that a slow
/// drift of the machine falls on all arms alike.
pub(crate) fn alternate(arms: &[Arm], repetitions: usize) -> Vec<(usize, Arm)> {
    let mut order = Vec::with_capacity(arms.len() * repetitions);
    for repetition in 0..repetitions {
        let forwards = arms.iter().map(|&arm| (repetition, arm));
        if repetition % 2 == 0 {
            order.extend(forwards);
        } else {
            order.extend(forwards.rev());
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_arms_alternate_abba() {
        let order: Vec<&str> =
            alternate(&[Arm::Auto, Arm::Local], 4).iter().map(|(_, arm)| arm.name()).collect();
        assert_eq!(order, ["auto", "local", "local", "auto", "auto", "local", "local", "auto"]);
    }

    #[test]
    fn one_arm_is_simply_repeated() {
        assert_eq!(alternate(&[Arm::Plain], 2), [(0, Arm::Plain), (1, Arm::Plain)]);
    }

    #[test]
    fn the_plain_arm_sends_no_header() {
        assert_eq!(Arm::Plain.header(), None);
        assert_eq!(Arm::Local.header(), Some("local"));
    }
}
