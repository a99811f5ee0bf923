//! Every valid program assembles: every instruction form, on every target.

mod common;

use common::{forms, refused};
use flashcore_ptx::{Builder, Role, Target, U32, print};

/// Each form alone, for the lowest target that has it: the PTX version that the printer chooses
/// must support it.
#[test]
fn every_form_alone_on_its_lowest_target() {
    let mut programs = Vec::new();
    let mut nowhere = Vec::new();
    for form in forms::all() {
        match Target::NAMED.iter().find_map(|target| form.program(*target).ok()) {
            Some(program) => programs.push((form.name, program)),
            None => nowhere.push(form.name),
        }
    }
    // The enumeration includes combinations that do not exist, which the validator must refuse.
    assert!(programs.len() > 700, "only {} forms are valid", programs.len());
    assert!(nowhere.len() > 300, "only {} combinations are refused", nowhere.len());
    let messages = refused(&programs);
    assert!(messages.is_empty(), "{} refused:\n{}", messages.len(), messages.join("\n"));
}

/// All forms a target has, in one program for each target.
#[test]
fn every_form_of_every_target() {
    let forms = forms::all();
    let programs: Vec<_> = Target::NAMED
        .iter()
        .map(|target| (target.to_string(), forms::all_in_one(&forms, *target).unwrap()))
        .collect();
    let messages = refused(&programs);
    assert!(messages.is_empty(), "{} refused:\n{}", messages.len(), messages.join("\n"));
}

/// The PTX version is the lowest that the program allows.
#[test]
fn versions_are_low() {
    let forms = forms::all();
    let version = |name: &str, target| {
        let form = forms.iter().find(|form| form.name == name).unwrap();
        let text = print(&form.program(target).unwrap());
        text.lines().next().unwrap().to_owned()
    };
    assert_eq!(version("Add F32", Target::SM_75), ".version 6.3");
    assert_eq!(version("Add F32", Target::SM_80), ".version 7.0");
    assert_eq!(version("tensor load 2d multicast false", Target::SM_90), ".version 8.0");
    assert_eq!(version("wgmma by a predicate", Target::SM_90A), ".version 8.0");
}

/// Names are printed as comments, and no name can end its comment.
#[test]
fn odd_names_are_comments() {
    let names = ["", "a \\", "*/", "/* begun", "quoted \"", "};", "a // b, c"];
    let programs: Vec<_> = names
        .into_iter()
        .map(|name| {
            let mut k = Builder::new("k", Target::SM_80, 64);
            k.shared(name, 16, 16);
            k.parameter::<U32>(name);
            k.parameter::<U32>(name);
            k.role(Role::warps(name, 0..1), |k| k.warp_sync());
            (name.to_owned(), k.finish().unwrap())
        })
        .collect();
    let messages = refused(&programs);
    assert!(messages.is_empty(), "{} refused:\n{}", messages.len(), messages.join("\n"));
}
